-- Stream tables that are refreshed together, on request or because it is cheaper.
ALTER TABLE pgtrickle.pgt_stream_tables
    ADD COLUMN refresh_group text,
    ADD COLUMN own_seconds real;
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.refresh_group IS 'Refreshed in one transaction '
                                                               'with the others of this name, '
                                                               'and with what they read.';
COMMENT ON COLUMN pgtrickle.pgt_stream_tables.own_seconds IS 'Its part of the last refresh, '
                                                             'without those it was refreshed with.';
