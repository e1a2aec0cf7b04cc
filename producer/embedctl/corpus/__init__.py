"""Corpora as records: jsonl, json, txt, csv, tsv and parquet, plain or compressed, in files, folders and streams.

A record's text, id and kept fields are made and checked here, and its mistakes told.
"""
