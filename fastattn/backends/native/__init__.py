"""The native libraries of csrc/: loading, the layout of arguments, and errors of a damaged file."""
