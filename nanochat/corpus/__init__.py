"""Text becomes shards: files and rows of tables are filtered, duplicates are left out, and what remains is written as
parquet, on one machine or on a cluster. scripts/prepare_data.py runs it."""
