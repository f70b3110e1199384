"""What others can test with: a pool of processes that form a ring (`ringspun.testing.pool`)."""
