-- Who may change a stream table, and what its owner may read. These functions run behind the gate, which knows the
-- caller, or are called at every refresh.

CREATE OR REPLACE FUNCTION pgtrickle._require_owner(caller name, id bigint, action text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    storage record;
BEGIN
    SELECT c.oid::regclass AS relation, c.relowner INTO storage
    FROM pgtrickle.pgt_stream_tables AS s LEFT JOIN pg_class AS c ON c.oid = s.pgt_relid WHERE s.pgt_id = id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream table with id %', id USING ERRCODE = 'undefined_table';
    ELSIF storage.relowner IS NULL AND has_function_privilege(caller, 'pgtrickle._administer()', 'EXECUTE') THEN
        RETURN; -- its table was dropped
    ELSIF NOT pgtrickle._acts_for(caller, storage.relowner) THEN
        RAISE EXCEPTION 'role % may not % stream table %', quote_ident(caller), action,
                coalesce(storage.relation::text, id::text)
            USING ERRCODE = 'insufficient_privilege',
                  HINT = coalesce(format('It belongs to role %s.', storage.relowner::regrole),
                                  'Its table was dropped.');
    END IF;
END
$$;

-- What is wrong with the owners of a stream table's parts; NULL if nothing is. Its functions run with their owner's
-- rights, so they must belong to the owner of the stream table.
CREATE OR REPLACE FUNCTION pgtrickle._ownership_problem(id bigint) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE
        WHEN c.oid IS NULL THEN format('its table %I.%I was dropped', s.pgt_schema, s.pgt_name)
        WHEN v.oid IS NULL THEN 'its query view was dropped, together with something it reads'
        WHEN f.number = 0 THEN format('its functions read_%1$s and write_%1$s in pgtrickle_views were dropped', id)
        WHEN v.relowner <> c.relowner OR NOT f.same_owner
            OR st.relowner
                NOT IN (c.relowner, (SELECT n.nspowner FROM pg_namespace AS n WHERE n.nspname = 'pgtrickle'))
        THEN format('it belongs to %s, but its view and functions in pgtrickle_views do not', c.relowner::regrole)
        END
    FROM pgtrickle.pgt_stream_tables AS s
    LEFT JOIN pg_class AS c ON c.oid = s.pgt_relid
    LEFT JOIN pg_class AS v ON v.oid = s.view_relid
    LEFT JOIN pg_class AS st ON st.relnamespace = 'pgtrickle_views'::regnamespace AND st.relname = 'state_' || id
    LEFT JOIN LATERAL (
        SELECT count(*) AS number, bool_and(p.proowner = c.relowner AND p.prosecdef) AS same_owner FROM pg_proc AS p
        WHERE p.oid IN (SELECT pgtrickle._owner_functions(id))
    ) AS f ON true
    WHERE s.pgt_id = id
$$;

-- The columns of sources that the owner of a stream table may not, or no longer, read, and functions that it may not
-- call, as text; NULL if there are none. Tables behind another role's view are read with that role's rights. Every
-- refresh calls this: without a view in between, nearly always, the recorded columns answer in a tenth of the time,
-- and PL/pgSQL keeps its plans.
CREATE OR REPLACE FUNCTION pgtrickle._privilege_problem(id bigint) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS v ON v.oid = s.view_relid
        JOIN pg_rewrite AS r ON r.ev_class = v.oid
        JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
          AND d.refclassid = 'pg_class'::regclass
        JOIN pg_class AS c ON c.oid = d.refobjid
        WHERE s.pgt_id = id AND c.oid <> v.oid
          -- What the view reads now: its owner can replace it.
          AND (c.relkind = 'v'
               OR CASE WHEN d.refobjsubid > 0 THEN has_column_privilege(v.relowner, c.oid, d.refobjsubid::smallint,
                                                                        'SELECT')
                       ELSE has_any_column_privilege(v.relowner, c.oid, 'SELECT') END IS NOT TRUE)
    ) AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS v ON v.oid = s.view_relid
        JOIN pgtrickle.pgt_dependencies AS d USING (pgt_id)
        WHERE s.pgt_id = id
          AND (has_any_column_privilege(v.relowner, d.source_relid, 'SELECT') IS NOT TRUE
               OR EXISTS (SELECT FROM unnest(d.columns_used) AS a
                          WHERE has_column_privilege(v.relowner, d.source_relid, a, 'SELECT') IS NOT TRUE))
    ) AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_dependencies AS d JOIN pg_class AS c ON c.oid = d.source_relid
        WHERE d.pgt_id = id AND c.relrowsecurity
    ) AND NOT EXISTS (
        SELECT FROM pgtrickle.pgt_stream_tables AS s
        JOIN pg_class AS v ON v.oid = s.view_relid
        JOIN pg_rewrite AS r ON r.ev_class = v.oid
        JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
        LEFT JOIN pg_operator AS o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
        WHERE s.pgt_id = id AND (d.refclassid = 'pg_proc'::regclass OR o.oid IS NOT NULL)
          AND has_function_privilege(v.relowner, coalesce(o.oprcode::oid, d.refobjid), 'EXECUTE') IS NOT TRUE
    ) THEN
        RETURN NULL;
    END IF;
    RETURN
        nullif(concat_ws('; ',
                         (SELECT
                          string_agg(CASE WHEN secured.applies THEN
                                          format('row-level security on %s applies to role %s', source.relation,
                                                 role::regrole)
                                   ELSE format('role %s may not read %s of %s', role::regrole,
                             coalesce('column ' || pgtrickle._column_names(source.relation, missing.columns),
                                      'any column'),
                             source.relation) END, '; ')
    FROM pgtrickle.pgt_stream_tables AS s
    CROSS JOIN LATERAL pgtrickle._sources(s.view_relid) AS source
    CROSS JOIN LATERAL unnest(source.checked_as) AS role
    CROSS JOIN LATERAL (
        SELECT array_agg(a) AS columns FROM unnest(source.columns) AS a
        WHERE NOT has_column_privilege(role, source.relation, a, 'SELECT')
    ) AS missing
    CROSS JOIN LATERAL (SELECT pgtrickle._row_security_applies(role, source.relation) AS applies) AS secured
    WHERE s.pgt_id = id
      AND (missing.columns IS NOT NULL OR NOT has_any_column_privilege(role, source.relation, 'SELECT')
           OR secured.applies)), (
        -- Including functions behind views: PostgreSQL checks the role that runs the query, not the owner of the view.
        SELECT string_agg(DISTINCT format('role %s may not call %s', v.relowner::regrole, f.fn::regprocedure), '; ')
        FROM pgtrickle.pgt_stream_tables AS s JOIN pg_class AS v ON v.oid = s.view_relid
        CROSS JOIN LATERAL pgtrickle._functions_used(s.view_relid) AS f
        WHERE s.pgt_id = id AND NOT has_function_privilege(v.relowner, f.fn, 'EXECUTE'))), '');
END
$$;

-- Sources that a query reads through a view with the rights of the view's owner, and that its own owner may not read:
-- only PostgreSQL knows which rows and columns that view shows. NULL if there are none.
CREATE OR REPLACE FUNCTION pgtrickle._hidden_sources(view regclass) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_rewrite AS r
        JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
          AND d.refclassid = 'pg_class'::regclass
        JOIN pg_class AS c ON c.oid = d.refobjid
        WHERE r.ev_class = view AND c.relkind = 'v' AND c.oid <> view
    ) THEN
        RETURN NULL; -- nearly always
    END IF;
    RETURN (
        SELECT string_agg(DISTINCT s.relation::text, ', ')
        FROM pg_class AS v CROSS JOIN LATERAL pgtrickle._sources(view) AS s
        WHERE v.oid = view AND s.checked_as <> ARRAY[v.relowner]
          AND (NOT has_any_column_privilege(v.relowner, s.relation, 'SELECT')
               OR EXISTS (SELECT FROM unnest(s.columns) AS a
                          WHERE NOT has_column_privilege(v.relowner, s.relation, a, 'SELECT'))
               OR pgtrickle._row_security_applies(v.relowner, s.relation)));
END
$$;
