-- Row IDs are computed by another function. The next refresh that writes to a stream table replaces its row IDs.
ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN has_former_row_ids boolean NOT NULL DEFAULT false;
UPDATE pgtrickle.pgt_stream_tables SET has_former_row_ids = true WHERE key_columns IS NULL OR st_placement <> 'local';
