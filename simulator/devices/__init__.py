"""How long a step takes on a device: cards, models and the roofline between them.

`cards` has the properties of cards, `model_shape` reads a model's sizes from its configuration, and
`roofline` and `measured_steps` predict the time of steps. Imports `checkpoint`, `scheduling` and
`protocol`.
"""
