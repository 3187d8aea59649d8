"""The gateway in front of vLLM servers that somebody else started.

`api` says what is asked of vLLM and what it answers, `client` asks one server, `exchange` runs one attempt of a request
on one or two of them. `servers` knows which servers there are and whether they work, `look` asks them how they are, and
`exposition` and `others` read the answer; `kv_events` and `event_feed` follow what is in their prefix
caches. `service` puts these under the gateway, and `run` brings it all up.
"""
