"""The framework-free core: everything that is *decision*, as plain data. Start at README.md beside this file."""
