"""Starting roles as processes, and ending them."""
