-- Row IDs, the trigger that guards rows, and changes that came with a dump.

-- The ID of a row without a key: 128 bits of a hash of its text. A user who can write to a source must not be able to
-- find two rows with the same ID. Not md5(): a server in FIPS mode refuses it.
CREATE OR REPLACE FUNCTION pgtrickle._row_id(printed text) RETURNS uuid
LANGUAGE sql STABLE STRICT PARALLEL SAFE
AS $$
    SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(pg_catalog.convert_to(printed, 'UTF8')), 1, 16),
                             'hex')::uuid
$$;

-- The same up to catalog version 20; its collisions can be computed in minutes. Still used for tables that Citus
-- distributes by it.
CREATE OR REPLACE FUNCTION pgtrickle._former_row_id(printed text) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
AS $$
    SELECT (pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.hashtextextended(printed COLLATE pg_catalog."C", 0)), 16, '0')
            || pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.hashtextextended(printed COLLATE pg_catalog."C", 1)), 16,
                               '0'))::uuid
$$;

-- Changes in a dump from another server have transaction IDs that are still in the future here: they would count as
-- new. What this server's own writers wrote since is not visible to this statement's snapshot.
CREATE OR REPLACE FUNCTION pgtrickle._drop_foreign_changes(stable_name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    buffer regclass := (SELECT t.buffer_relid FROM pgtrickle.pgt_change_tracking t
                        WHERE t.source_stable_name = stable_name);
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'changes cannot be dropped in a % transaction',
                current_setting('transaction_isolation')
            USING ERRCODE = 'active_sql_transaction',
                  HINT = 'To an old snapshot, changes of this server look like those of another.';
    ELSIF buffer IS NOT NULL THEN
        EXECUTE format('DELETE FROM %s WHERE __pgt_xid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint',
                       buffer);
        DELETE FROM pgtrickle_changes.pgt_markers
        WHERE source_stable_name = stable_name AND xid >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    END IF;
END
$$;

-- Refuses changes of a stream table that do not come from its refresh. Only the service can write apply_xid.
CREATE OR REPLACE FUNCTION pgtrickle._guard() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_stream_tables
                   WHERE pgt_relid = TG_RELID AND apply_xid = pg_current_xact_id_if_assigned()) THEN
        RAISE EXCEPTION 'stream table %.% cannot be changed directly (%)', quote_ident(TG_TABLE_SCHEMA),
                quote_ident(TG_TABLE_NAME), TG_OP
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'It follows its defining query: change the tables that the query reads.';
    END IF;
    RETURN NULL;
END
$$;
