"""The embedded engine: transformers' model in its own process, behind SGLang's HTTP interface.

`engine.EmbeddedEngine` is what a driver uses. The other modules run in the engine's process:
`__main__` (start and end), `server` (HTTP), `requests` (what a request may ask), `sampling`
(tokens and log-probs), `weights` (loading).
"""
