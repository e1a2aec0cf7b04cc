"""The calls that clients make, in the forms of OpenAI and of TEI. One description says which fields each takes."""
