"""One table in training: gradients that are staged, copies between devices, edits of a script."""
