-- The size of change buffers.

-- Size and rows of a buffer. Rows of small buffers are counted, those of large ones come from statistics, which are
-- empty on a standby or after a crash. The size of a locked buffer is unknown; the lock is not waited for.
--
-- Everything runs in a subtransaction that is rolled back, which releases the lock: held until the end of the caller's
-- transaction, it would keep the buffer from being emptied. Variables keep their values.
CREATE OR REPLACE FUNCTION pgtrickle._measure_buffer(buffer regclass, at_least bigint, OUT row_count bigint,
                                                     OUT size_bytes bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET lock_timeout = '20ms'
AS $$
DECLARE
    counted CONSTANT bigint := 8 * 1024 * 1024;
    filled bigint;
BEGIN
    row_count := (SELECT sum(pg_stat_get_live_tuples(member)) FROM pgtrickle._partition_tree(buffer) AS member);
    BEGIN
        SELECT sum(pg_relation_size(member)), sum(pg_table_size(member)) INTO filled, size_bytes
        FROM pgtrickle._partition_tree(buffer) AS member;
        IF filled = 0 THEN
            row_count := 0;
        ELSIF size_bytes >= at_least AND (filled < counted OR row_count = 0) THEN
            EXECUTE format('SELECT count(*) FROM %s', buffer) INTO row_count;
        END IF;
        RAISE SQLSTATE 'PT001';
    EXCEPTION WHEN SQLSTATE 'PT001' OR lock_not_available OR undefined_table THEN
        RETURN;
    END;
END
$$;

-- Buffers of at least that size.
CREATE OR REPLACE FUNCTION pgtrickle._buffer_sizes(at_least bigint)
RETURNS TABLE (source_schema text, source_name text, stable_name text, buffer text, row_count bigint,
               size_bytes bigint,
               readers integer)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(n.nspname, d.source_schema), coalesce(c.relname, d.source_name), t.source_stable_name,
           'pgtrickle_changes.' || b.relname, m.row_count, m.size_bytes, d.readers
    FROM pgtrickle.pgt_change_tracking AS t
    JOIN pg_class AS b ON b.oid = t.buffer_relid
    LEFT JOIN pg_class AS c ON c.oid = t.source_relid
    LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (
        SELECT min(p.source_schema) AS source_schema, min(p.source_name) AS source_name, count(*)::integer AS readers
        FROM pgtrickle.pgt_dependencies AS p WHERE p.source_relid = t.source_relid
    ) AS d
    CROSS JOIN LATERAL pgtrickle._measure_buffer(t.buffer_relid, at_least) AS m
    WHERE coalesce(m.size_bytes, 0) >= at_least
$$;

CREATE OR REPLACE FUNCTION pgtrickle.change_buffer_sizes()
RETURNS TABLE (source_schema text, source_name text, stable_name text, buffer text, row_count bigint,
               size_bytes bigint,
               readers integer)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM pgtrickle._buffer_sizes(0) ORDER BY 1, 2
$$;
