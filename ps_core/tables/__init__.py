"""Tables as values: elements, optimizers, specs, and the layout of tensors."""
