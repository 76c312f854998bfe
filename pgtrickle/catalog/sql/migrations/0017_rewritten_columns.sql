-- Notices values that ALTER TABLE recomputed in another database, and swapped column names with Citus. Buffers store
-- values of any length and precision.

ALTER TABLE pgtrickle.pgt_consumers ADD COLUMN written_as text[];
COMMENT ON COLUMN pgtrickle.pgt_consumers.written_as IS 'The state of its columns and of the '
                                                        'table''s files when capture was last made to fit.';

ALTER TABLE pgtrickle.pgt_change_tracking ADD COLUMN captured_as jsonb;
COMMENT ON COLUMN pgtrickle.pgt_change_tracking.captured_as IS 'The names that its columns '
                                                               'had when capture by name was '
                                                               'last made to fit, by number.';

DO $$
DECLARE
    col record;
BEGIN
    FOR col IN
        SELECT a.attrelid::regclass AS buffer, a.attname,
               format_type(a.atttypid, -1)
                   || CASE WHEN c.oid IS NOT NULL THEN format(' COLLATE %I.%I', n.nspname, c.collname)
                           ELSE '' END AS type
        FROM pgtrickle.pgt_change_tracking AS t JOIN pg_attribute AS a ON a.attrelid = t.buffer_relid
        LEFT JOIN pg_collation AS c ON c.oid = a.attcollation LEFT JOIN pg_namespace AS n ON n.oid = c.collnamespace
        WHERE a.attnum > 0 AND NOT a.attisdropped AND a.atttypmod <> -1
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER COLUMN %I TYPE %s', col.buffer, col.attname, col.type);
    END LOOP;
END
$$;

-- pgtrickle._shards_fit(), _shards_fit_now() and _capture_otherwise() stay: nodes call them until their capture
-- functions are renewed.
