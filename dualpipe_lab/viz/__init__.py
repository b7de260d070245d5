"""Pictures that the library draws from what really happened."""
