-- Less cost for writers: buffers check nothing for each row, and the sequence of every buffer has a value.

DO $$
DECLARE
    tracking record;
    turn regclass;
BEGIN
    FOR tracking IN
        SELECT t.source_stable_name, t.buffer_relid FROM pgtrickle.pgt_change_tracking AS t
        JOIN pg_class AS b ON b.oid = t.buffer_relid
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER COLUMN __pgt_xid DROP NOT NULL, ALTER COLUMN __pgt_w DROP NOT NULL',
                       tracking.buffer_relid);
        turn := format('pgtrickle_changes.%I', 'turn_' || tracking.source_stable_name)::regclass;
        IF pg_sequence_last_value(turn) IS NULL THEN
            PERFORM setval(turn, 1);
        END IF;
    END LOOP;
END
$$;

-- pgtrickle._shard_fits() and _shard_fits_now() stay: nodes call them until their capture functions are renewed.
DROP FUNCTION IF EXISTS pgtrickle._write_capture_function(text, text);
