-- Functions of users in queries over several databases. An expression is evaluated in the database that its columns are in, so a function
-- has to be the same everywhere. It runs there with the rights of whoever reads: its owner must be somebody who has them anyway.

-- What is to be known of functions, each named with its schema and the types of its arguments. Two with the same definition return the same.
CREATE OR REPLACE FUNCTION pgtrickle._describe_functions(functions text[])
RETURNS TABLE (function text, definition text, version text, problem text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT f.name,
           pgtrickle.stable_hash(concat_ws('|', l.lanname, p.prokind, p.provolatile, p.proisstrict, p.prosecdef, p.proretset, p.prorettype::regtype,
                                           p.proconfig, p.prosrc, p.probin, pg_get_function_sqlbody(p.oid),
                                           (SELECT e.extname || ' ' || e.extversion FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid
                                            WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'))),
           concat_ws(':', p.oid, p.xmin),
           CASE WHEN p.oid IS NULL THEN 'there is none'
                WHEN p.prokind <> 'f' THEN 'it is an aggregate or a window function'
                WHEN NOT has_function_privilege(p.oid, 'EXECUTE') THEN format('role %I may not call it', current_user)
                -- Whoever can act as this role gains nothing by having it call a function.
                WHEN NOT (r.rolsuper OR pg_has_role(r.oid, current_user::regrole, 'MEMBER'))
                THEN format('it belongs to role %I, and would run with the rights of role %I', r.rolname, current_user) END
    FROM unnest(functions) AS f (name)
    LEFT JOIN pg_proc AS p ON p.oid = to_regprocedure(f.name)
    LEFT JOIN pg_language AS l ON l.oid = p.prolang
    LEFT JOIN pg_roles AS r ON r.oid = p.proowner
$$;

-- The functions that a query calls and that are not PostgreSQL's own.
CREATE OR REPLACE FUNCTION pgtrickle._own_functions(view regclass) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT f.fn::regprocedure::text FROM pgtrickle._functions_used(view) AS f WHERE f.nspname <> 'pg_catalog'
$$;

-- The registered databases that a query reads.
CREATE OR REPLACE FUNCTION pgtrickle._databases_behind(view regclass) RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT f.database FROM pgtrickle._behind(view) AS b JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = b.relation
$$;

-- What a registered database said of functions.
CREATE OR REPLACE FUNCTION pgtrickle._note_functions(database text, functions text[], definitions text[], problems text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_use(database);
    INSERT INTO pgtrickle.pgt_foreign_functions AS k (database, function, definition, problem)
    SELECT _note_functions.database, n.function, n.definition, n.problem
    FROM unnest(functions, definitions, problems) AS n (function, definition, problem)
    ON CONFLICT ON CONSTRAINT pgt_foreign_functions_pkey
    DO UPDATE SET definition = excluded.definition, problem = excluded.problem
    WHERE (k.definition, k.problem) IS DISTINCT FROM (excluded.definition, excluded.problem);
END
$$;

-- Why functions that a query calls cannot be called in all databases that it reads; NULL if they can. A query that reads none calls what it likes.
CREATE OR REPLACE FUNCTION pgtrickle._function_conflicts(view regclass) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    databases text[] := ARRAY(SELECT pgtrickle._databases_behind(view));
BEGIN
    IF databases = '{}' THEN
        RETURN NULL;
    END IF;
    RETURN (
        SELECT string_agg(format('%s in database %I: %s', here.function, d.name,
                                 coalesce(k.problem, CASE WHEN k.function IS NULL THEN 'not compared yet' ELSE 'it is not the same as here' END)),
                          '; ' ORDER BY here.function, d.name)
        FROM pgtrickle._describe_functions(ARRAY(SELECT pgtrickle._own_functions(view))) AS here
        CROSS JOIN unnest(databases) AS d (name)
        LEFT JOIN pgtrickle.pgt_foreign_functions AS k ON k.database = d.name AND k.function = here.function
        WHERE k.problem IS NOT NULL OR k.definition IS DISTINCT FROM here.definition);
END
$$;
