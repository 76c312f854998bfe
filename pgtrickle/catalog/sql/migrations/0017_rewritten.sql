-- Values of a table in another database that ALTER TABLE computes anew are noticed; buffers of tables that Citus has take values of any length
-- and precision, for their writers no longer compare those.

ALTER TABLE pgtrickle.pgt_consumers ADD COLUMN written_as text[];
COMMENT ON COLUMN pgtrickle.pgt_consumers.written_as IS 'The state of its columns and of the table''s files when capture was last made to fit.';

DO $$
DECLARE
    col record;
BEGIN
    FOR col IN
        SELECT a.attrelid::regclass AS buffer, a.attname, format_type(a.atttypid, -1) || coalesce(format(' COLLATE %I.%I', n.nspname, c.collname), '') AS type
        FROM pgtrickle.pgt_change_tracking AS t JOIN pg_attribute AS a ON a.attrelid = t.buffer_relid
        LEFT JOIN pg_collation AS c ON c.oid = a.attcollation LEFT JOIN pg_namespace AS n ON n.oid = c.collnamespace
        WHERE t.capture_kind = 'shards' AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypmod <> -1
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER COLUMN %I TYPE %s', col.buffer, col.attname, col.type);
    END LOOP;
END
$$;

-- pgtrickle._shards_fit(), _shards_fit_now() and _capture_otherwise() stay: nodes call them until their capture functions are written anew.
