"""How long a step takes on a device: cards, models and the roofline between them.

`cards` lists what is known of cards, `model_shape` reads a model's sizes from its configuration,
`roofline` and `profile` predict steps from them. Imports `checkpoint`, `scheduling` and `protocol`.
"""
