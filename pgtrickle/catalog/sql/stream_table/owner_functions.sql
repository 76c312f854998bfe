-- Functions in pgtrickle_views that run with the rights of a stream table's owner.

-- The functions of a stream table that run with its owner's rights.
CREATE OR REPLACE FUNCTION pgtrickle._owner_functions(id bigint) RETURNS SETOF regprocedure
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT f FROM unnest(ARRAY[to_regprocedure(format('pgtrickle_views.read_%s(text, text[])', id)),
                               to_regprocedure(format('pgtrickle_views.write_%s(text, text[])', id))]) AS f
                                   WHERE f IS NOT NULL
$$;

-- What the service runs with the owner's rights: reading what the query reads, and changing the stream table. The
-- owner cannot replace these functions, because that needs CREATE on their schema, but can alter their options, for
-- example to SECURITY INVOKER. So they check that they run with their owner's rights, through names that no search
-- path changes. They also check that the session has the rights of the service's role: a former login of the service,
-- or a role to which a former owner granted EXECUTE, does not.
CREATE OR REPLACE FUNCTION pgtrickle._owner_function(id bigint, kind text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format(E'CREATE OR REPLACE FUNCTION pgtrickle_views.%1$I(statement pg_catalog.text, args pg_catalog.text[])'
                  ' RETURNS %2$s\nLANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %3$L',
        kind || '_' || id, CASE kind WHEN 'read' THEN 'SETOF pg_catalog.record' ELSE 'pg_catalog.int8[]' END,
        E'\n' || rtrim(pgtrickle._fill_template('owner_' || kind, jsonb_build_object(
            'function', kind || '_' || id, 'signature',
            format('pgtrickle_views.%s_%s(pg_catalog.text, pg_catalog.text[])', kind, id),
            'service_role', 'pgtrickle._service_role()')), E'\n'))
$$;

-- The statements that create or renew them, for the owner to run.
CREATE OR REPLACE FUNCTION pgtrickle._owner_functions_ddl(id bigint) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pgtrickle._owner_function(id, 'read')
    UNION ALL
    SELECT pgtrickle._owner_function(id, 'write')
    UNION ALL
    SELECT format(c.command,
                  format('pgtrickle_views.%1$I(pg_catalog.text, pg_catalog.text[]), '
                         'pgtrickle_views.%2$I(pg_catalog.text, pg_catalog.text[])',
                                    'read_' || id, 'write_' || id), pgtrickle._service_role())
    FROM (VALUES ('REVOKE ALL ON FUNCTION %1$s FROM PUBLIC'), ('GRANT EXECUTE ON FUNCTION %1$s TO %2$I'))
        AS c (command)
    UNION ALL
    -- Allows the service to lock the view, and so the tables it reads, before it takes a snapshot.
    SELECT format('GRANT SELECT ON pgtrickle_views.%I TO %I', 'q_' || id, pgtrickle._service_role())
$$;

-- Creates them as the owner, and revokes what the owner's default privileges grant to others.
CREATE OR REPLACE FUNCTION pgtrickle._make_owner_functions(id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    command text;
    stranger record;
BEGIN
    FOR command IN SELECT pgtrickle._owner_functions_ddl(id) LOOP
        EXECUTE command;
    END LOOP;
    FOR stranger IN SELECT DISTINCT f.function, a.grantee::regrole AS role
                    FROM pgtrickle._owner_functions(id) AS f (function)
                    JOIN pg_proc AS p ON p.oid = f.function
                    CROSS JOIN LATERAL aclexplode(p.proacl) AS a
                    WHERE a.grantee NOT IN (0, p.proowner)
                      AND pg_get_userbyid(a.grantee) <> pgtrickle._service_role() LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM %s', stranger.function, stranger.role);
    END LOOP;
END
$$;

-- Whether the functions of a stream table are those of this version.
CREATE OR REPLACE FUNCTION pgtrickle._are_owner_functions_current(id bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) = 2
           AND bool_and(l.lanname = 'plpgsql'
                        AND strpos(pgtrickle._owner_function(id, split_part(p.proname, '_', 1)),
                                   quote_literal(p.prosrc)) > 0)
    FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang WHERE p.oid IN (SELECT pgtrickle._owner_functions(id))
$$;

-- Whether they are those of an earlier version, which the service renews.
CREATE OR REPLACE FUNCTION pgtrickle._are_owner_functions_earlier(id bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
                   WHERE p.oid = to_regprocedure(format('pgtrickle_views.write_%s(text, text[])', id)) AND p.prosecdef
                     AND l.lanname = 'plpgsql'
                     AND regexp_replace(p.prosrc, '\s+', ' ', 'g') = 'DECLARE counts bigint[]; '
                                                                     'BEGIN IF args IS NULL THEN EXECUTE statement;'
                         ' ELSE EXECUTE statement INTO counts USING args; END IF; RETURN counts; END')
       AND to_regprocedure(format('pgtrickle_views.read_%s(text, text[])', id)) IS NULL
$$;

-- Lets the service renew functions of an earlier version: it runs the returned statements through the old
-- write_<id>(), as the owner, between _open_views() and _close_views().
CREATE OR REPLACE FUNCTION pgtrickle._renew_owner_functions(id bigint) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._open_views(pg_get_userbyid(c.relowner))
    FROM pgtrickle.pgt_stream_tables AS s JOIN pg_class AS c ON c.oid = s.pgt_relid WHERE s.pgt_id = id;
    -- The old function runs once more, so its text is checked, under the lock: until its end nobody else can alter it.
    IF NOT pgtrickle._are_owner_functions_earlier(id) THEN
        RAISE EXCEPTION 'the functions of stream table % in pgtrickle_views were not created by pgtrickle',
                (SELECT s.pgt_relid FROM pgtrickle.pgt_stream_tables AS s WHERE s.pgt_id = id)
            USING ERRCODE = 'invalid_object_definition', HINT = 'Drop the stream table and create it again.';
    END IF;
    RETURN QUERY SELECT pgtrickle._owner_functions_ddl(id)
                 UNION ALL SELECT format('DROP FUNCTION IF EXISTS pgtrickle_views.%I(pg_catalog.text)', 'read_' || id);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._end_renewal(id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._close_views(pg_get_userbyid(c.relowner))
    FROM pgtrickle.pgt_stream_tables AS s JOIN pg_class AS c ON c.oid = s.pgt_relid WHERE s.pgt_id = id;
END
$$;
