"""SGLang engines, over HTTP: SGLang itself is never imported here, it lives in its own environment.

`engine.SglangEngine` is what a driver uses; `server.SglangServer` starts a server and ends it.
`transports` brings weights to it. `server_side` runs in the server's process, under the
interpreter that has SGLang, and imports nothing of this package.
"""
