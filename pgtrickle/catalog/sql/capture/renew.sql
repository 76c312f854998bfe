-- After an upgrade: writes the capture functions of this release. Only if the source still has the columns and types
-- that its buffer was made for: the other functions leave markers until _retrack() updates the buffer, and continue
-- to. A column altered at this moment is noticed as usual, when the function runs.
CREATE OR REPLACE FUNCTION pgtrickle._renew_capture() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tracking record;
BEGIN
    FOR tracking IN
        SELECT t.* FROM pgtrickle.pgt_change_tracking AS t
        JOIN pg_proc AS p ON p.oid = to_regprocedure(format('pgtrickle_changes.capture_%s()', t.source_stable_name))
        JOIN pg_class AS c ON c.oid = t.source_relid
        WHERE p.prosrc <> pgtrickle._inert_body()
          -- On other nodes columns have other numbers: the coordinator renews their functions.
          AND (t.capture_kind <> 'shards' OR pgtrickle._citus_group() = 0)
          AND t.tracked_columns = pgtrickle._stored_columns(t.source_relid, t.tracked_columns)
    LOOP
        BEGIN
            PERFORM pgtrickle._write_capture_function(
                tracking.source_stable_name,
                CASE tracking.capture_kind
                    WHEN 'shards' THEN pgtrickle._shard_capture_body(pgtrickle._local_shard_spec(
                        current_user, tracking.source_relid, pgtrickle._shard_capture_spec(tracking.source_relid)))
                    ELSE pgtrickle._capture_body(tracking.source_relid, tracking.source_stable_name,
                                                 tracking.tracked_columns, tracking.capture_kind) END)
            WHERE NOT EXISTS (
                SELECT FROM unnest(tracking.tracked_columns) AS number
                JOIN pg_attribute AS b ON b.attrelid = tracking.buffer_relid AND b.attname = 'c' || number
                  AND NOT b.attisdropped
                WHERE pgtrickle._buffer_type(tracking.buffer_relid,
                                             b.attnum) <> pgtrickle._buffer_type(tracking.source_relid, number));
            PERFORM pgtrickle._grant_capture(pg_get_userbyid(c.relowner), tracking.source_relid) FROM pg_class AS c
            WHERE c.oid = tracking.source_relid;
        EXCEPTION WHEN insufficient_privilege THEN
            -- One table's owner must not keep all others from being upgraded.
            RAISE WARNING 'the capture function of % stays as it is: %', tracking.source_relid, SQLERRM;
        END;
    END LOOP;
END
$$;

REVOKE EXECUTE ON FUNCTION pgtrickle._renew_capture() FROM PUBLIC;

SELECT pgtrickle._renew_capture();

-- Consumers that existed before this was recorded.
UPDATE pgtrickle.pgt_consumers AS c SET written_as = pgtrickle._rewrite_state(s.oid, c.columns_used)
FROM pg_class AS s WHERE s.oid = c.source_relid AND c.written_as IS NULL;

-- Also if there was nothing to upgrade: `pgtrickle upgrade` is the way to reset a copied database by hand.
SELECT pgtrickle._reset_copied_database();
