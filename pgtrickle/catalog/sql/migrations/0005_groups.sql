-- Stream tables that somebody wants to see at one moment.
ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN refresh_group text;
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.refresh_group IS 'Refreshed in one transaction with the others of this name, and with what they read.';
