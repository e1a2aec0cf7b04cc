"""`embedctl gateway`: embeddings over HTTP, as the clients of OpenAI, TEI and infinity call for them.

It is a producer: it queues each request as a job in the interactive lane, and loads no model.
"""
