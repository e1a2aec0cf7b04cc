"""The calls that clients make, in the forms of OpenAI and of TEI, and their description."""
