"""What is printed and kept: result files, their comparison, and the page of all machines."""
