"""What stands before attention: the norm of queries and keys, and their rotation by positions."""
