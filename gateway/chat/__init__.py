"""Conversations: the input of chat templates, and the parsing of the model's answers.

One file for each model family's tool call format. Imports `gateway.output`, `gateway.grammars` and
`gateway.text`.
"""
