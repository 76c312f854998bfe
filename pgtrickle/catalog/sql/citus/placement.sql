-- Where a stream table is in a Citus cluster: on the coordinator, on all nodes, or distributed.

-- Objects created by pgtrickle belong to this node, except where propagation is turned on. Returns the previous
-- setting; NULL without Citus.
CREATE OR REPLACE FUNCTION pgtrickle._disable_ddl_propagation() RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    former text := current_setting('citus.enable_ddl_propagation', true);
BEGIN
    IF former IS NULL OR NOT pgtrickle._has_citus() THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('citus.enable_ddl_propagation', 'off', true);
    RETURN former;
END
$$;

-- As requested. By default a stream table is distributed if it reads a distributed table; its initial population then
-- decides how.
CREATE OR REPLACE FUNCTION pgtrickle._choose_st_placement(view regclass, wanted text, distribution_column text)
RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    wanted := lower(coalesce(wanted, CASE WHEN distribution_column IS NOT NULL THEN 'distributed' ELSE 'auto' END));
    IF wanted NOT IN ('auto', 'local', 'reference', 'distributed') THEN
        RAISE EXCEPTION 'st_placement cannot be %', quote_literal(wanted)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'It is local, reference, distributed or auto.';
    ELSIF wanted IN ('reference', 'distributed') AND NOT pgtrickle._has_citus() THEN
        RAISE EXCEPTION 'st_placement cannot be % in database %, which has no Citus', quote_literal(wanted),
                quote_ident(current_database())
            USING ERRCODE = 'feature_not_supported', HINT = 'Leave it out to create an ordinary table.';
    ELSIF distribution_column IS NOT NULL AND wanted <> 'distributed' THEN
        RAISE EXCEPTION 'output_distribution_column needs a distributed table, and st_placement is %',
                quote_literal(wanted)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave one of the two out.';
    ELSIF wanted = 'auto' AND NOT EXISTS (SELECT FROM pgtrickle._sources(view) AS s
                                          WHERE pgtrickle._is_distributed(s.relation)) THEN
        RETURN 'local';
    END IF;
    RETURN wanted;
END
$$;

-- A table that every apply to a distributed stream table writes. Citus manages it, on the coordinator only: that makes
-- such a transaction commit in two phases, here and on the nodes. It is not in the catalog, because nodes have one as
-- well.
CREATE OR REPLACE FUNCTION pgtrickle._prepare_two_phase_commit() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
BEGIN
    IF to_regclass('pgtrickle_changes.pgt_applies') IS NOT NULL THEN
        RETURN;
    END IF;
    CREATE TABLE pgtrickle_changes.pgt_applies (pgt_id bigint PRIMARY KEY, fencing_token bigint NOT NULL);
    COMMENT ON TABLE pgtrickle_changes.pgt_applies IS 'Written by every apply to a stream '
                                                      'table that Citus placed, so that it commits in two phases.';
    IF pgtrickle._service_role() <> current_user THEN
        EXECUTE format('GRANT SELECT, INSERT, UPDATE ON pgtrickle_changes.pgt_applies TO %I',
                       pgtrickle._service_role());
    END IF;
    PERFORM set_config('citus.enable_ddl_propagation', 'on', true);
    PERFORM citus_add_local_table_to_metadata('pgtrickle_changes.pgt_applies');
    PERFORM set_config('citus.enable_ddl_propagation', 'off', true);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._record_st_placement(caller name, id bigint, placement text,
                                                          distribution_column text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_owner(caller, id, 'distribute');
    UPDATE pgtrickle.pgt_stream_tables AS s
    SET st_placement = _record_st_placement.placement, output_distribution_column = distribution_column
        WHERE s.pgt_id = id;
    IF placement IN ('reference', 'distributed') THEN
        PERFORM pgtrickle._prepare_two_phase_commit();
    END IF;
END
$$;

-- Runs with the rights of its owner, while the table is empty.
CREATE OR REPLACE FUNCTION pgtrickle._distribute_stream_table(id bigint, placement text, distribution_column text)
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    storage regclass := (SELECT pgt_relid FROM pgtrickle.pgt_stream_tables WHERE pgt_id = id);
    former text := current_setting('citus.enable_ddl_propagation', true);
BEGIN
    IF placement IN ('reference', 'distributed') THEN
        PERFORM set_config('citus.enable_ddl_propagation', 'on', true);
        IF placement = 'reference' THEN
            PERFORM create_reference_table(storage);
        ELSE
            PERFORM create_distributed_table(storage, coalesce(distribution_column, '__pgt_row_id'));
        END IF;
        PERFORM set_config('citus.enable_ddl_propagation', former, true);
    END IF;
    PERFORM pgtrickle._gate('record_st_placement',
                            jsonb_build_object('id', id, 'placement', placement, 'column', distribution_column));
END
$$;

-- Whether distributed tables are read in full by queries of the coordinator, not at one moment on all nodes. Only if
-- that was requested.
CREATE OR REPLACE FUNCTION pgtrickle._is_read_through_coordinator(view regclass, refresh_mode text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (upper(refresh_mode) = 'FULL' OR pgtrickle._setting('citus_read') = 'coordinator')
       AND EXISTS (SELECT FROM pgtrickle._sources(view) AS s WHERE pgtrickle._is_distributed(s.relation))
$$;

CREATE OR REPLACE FUNCTION pgtrickle._record_coordinator(caller name, id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_owner(caller, id, 'distribute');
    UPDATE pgtrickle.pgt_stream_tables AS s SET through_coordinator = true
    WHERE s.pgt_id = id AND s.created_at = now(); -- in the transaction that creates it, when nobody can read it yet
    IF NOT FOUND THEN
        RAISE EXCEPTION 'only a new stream table can be computed by the coordinator'
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    PERFORM pgtrickle._register_sources(id);
END
$$;
