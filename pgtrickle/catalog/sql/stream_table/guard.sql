-- The trigger that protects stream tables.

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
