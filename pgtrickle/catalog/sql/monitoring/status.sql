-- The status of stream tables.

CREATE OR REPLACE FUNCTION pgtrickle.pgt_status()
RETURNS TABLE (
    pgt_id bigint, pgt_schema text, pgt_name text, status text, status_reason text, refresh_mode text,
    effective_mode text,
    mode_reason text, schedule text, staleness interval, data_timestamp timestamptz, reinit_reason text,
    consecutive_errors integer, last_error text, last_refresh_at timestamptz, last_action text, last_status text,
    verified_at timestamptz, verified text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s.pgt_id, coalesce(n.nspname, s.pgt_schema), coalesce(c.relname, s.pgt_name), s.status,
           coalesce(s.status_reason, pgtrickle._ownership_problem(s.pgt_id)),
           s.refresh_mode, s.effective_mode, s.mode_reason, s.schedule, make_interval(secs => f.staleness),
           s.data_timestamp,
           s.reinit_reason, s.consecutive_errors, s.last_error, h.end_time, h.action, h.status,
           v.at, CASE WHEN v.equal THEN 'equal' WHEN NOT v.equal THEN 'different' END
    FROM pgtrickle.pgt_visible_stream_tables AS s
    LEFT JOIN pgtrickle._freshness() AS f USING (pgt_id)
    LEFT JOIN pg_class AS c ON c.oid = s.pgt_relid
    LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
    LEFT JOIN LATERAL (
        SELECT r.end_time, r.action, r.status FROM pgtrickle.pgt_refresh_history AS r
        WHERE r.pgt_id = s.pgt_id ORDER BY r.refresh_id DESC LIMIT 1
    ) AS h ON true
    LEFT JOIN LATERAL (
        SELECT r.at, r.equal FROM pgtrickle.pgt_verifications AS r WHERE r.pgt_id = s.pgt_id
        ORDER BY r.verification_id DESC LIMIT 1
    ) AS v ON true
    ORDER BY 2, 3
$$;

CREATE OR REPLACE FUNCTION pgtrickle.get_refresh_history(name text, max_rows integer DEFAULT 20)
RETURNS SETOF pgtrickle.pgt_refresh_history
LANGUAGE sql STABLE
AS $$
    SELECT h.refresh_id, h.pgt_id, h.pgt_schema, h.pgt_name, h.start_time, h.end_time, h.status, h.action,
           h.initiated_by, h.reason, h.rows_in,
           h.rows_inserted, h.rows_updated, h.rows_deleted, h.phases, h.error, h.sqlstate, h.frontier, h.kind
    FROM pgtrickle.pgt_visible_history AS h
    WHERE h.pgt_id = pgtrickle._require_id(name) ORDER BY h.refresh_id DESC LIMIT max_rows
$$;

CREATE OR REPLACE FUNCTION pgtrickle.get_staleness(name text) RETURNS double precision
LANGUAGE sql STABLE
AS $$
    SELECT pgtrickle._staleness(pgtrickle._require_id(name))
$$;

CREATE OR REPLACE FUNCTION pgtrickle.explain_refresh_mode(name text)
RETURNS TABLE (configured_mode text, effective_mode text, reason text)
LANGUAGE sql STABLE
AS $$
    SELECT s.refresh_mode, s.effective_mode, s.mode_reason
    FROM pgtrickle.pgt_visible_stream_tables AS s WHERE s.pgt_id = pgtrickle._require_id(name)
$$;

CREATE OR REPLACE FUNCTION pgtrickle._definition(id bigint) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format(E'SELECT pg_catalog.set_config(''search_path'', %L, false);\nSELECT pgtrickle.create_stream_table(\n'
                  '    name => %L,\n    query => %L,\n'
                  '    schedule => %L,\n    refresh_mode => %L,\n    pooler_compatibility_mode => %L%s%s);',
                  s.session_settings ->> 'search_path', format('%I.%I', n.nspname, c.relname), s.defining_query,
                  s.schedule, s.refresh_mode, s.pooler_compatibility_mode,
                  format(E',\n    placement => %L', s.placement), format(E',\n    key_columns => %L', s.key_columns))
    FROM pgtrickle.pgt_visible_stream_tables AS s
    JOIN pg_class AS c ON c.oid = s.pgt_relid
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE s.pgt_id = id AND s.defining_query IS NOT NULL
$$;

CREATE OR REPLACE FUNCTION pgtrickle.export_definition(name text) RETURNS text
LANGUAGE sql STABLE
AS $$
    SELECT pgtrickle._definition(pgtrickle._require_id(name))
$$;
