-- User-defined functions, operators and types in queries over several databases. An expression is evaluated in the
-- database of its columns, as text: all names in it must have the same meaning everywhere. It runs there with the
-- rights of the reader: a role that owns a named object, or could replace it, must already have these rights.
--
-- Functions are named as by regprocedure; operators and types as by regoperator and format_type(), after `operator` or
-- `type` and a space.

-- Whether a role already has the rights of the current one: it gains nothing if the current role calls its code.
CREATE OR REPLACE FUNCTION pgtrickle._is_trusted_role(role oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT r.rolsuper OR pg_has_role(r.oid, current_user, 'MEMBER') FROM pg_roles AS r
                     WHERE r.oid = role), false)
$$;

-- The role that could have its code run with rights that it lacks where an object is named; NULL if there is none. The
-- owner of a schema can replace the objects in it, and so can the owner of an extension; the owner of the database is
-- trusted.
CREATE OR REPLACE FUNCTION pgtrickle._untrusted_owner(class regclass, object oid, owner oid, schema oid) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('%s belongs to role %s, and would run with the rights of role %I', found.what, found.owner::regrole,
                  current_user)
    FROM (SELECT 1 AS n, 'it' AS what, _untrusted_owner.owner
          UNION ALL
          SELECT 2, format('its schema %I', n.nspname), n.nspowner FROM pg_namespace AS n
          WHERE n.oid = schema
            AND n.nspowner
                NOT IN ('pg_database_owner'::regrole, (SELECT d.datdba FROM pg_database AS d
                                                       WHERE d.datname = current_database()))
          UNION ALL
          SELECT 3, format('its extension %I', e.extname), e.extowner FROM pg_depend AS d
          JOIN pg_extension AS e ON e.oid = d.refobjid
          WHERE d.classid = class AND d.objid = object AND d.deptype = 'e') AS found
    WHERE NOT pgtrickle._is_trusted_role(found.owner)
    ORDER BY found.n LIMIT 1
$$;

-- The same for a type and all types inside it, whose checks run when values are made.
CREATE OR REPLACE FUNCTION pgtrickle._untrusted_type_owner(type oid) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE inside AS (
        SELECT _untrusted_type_owner.type
        UNION
        SELECT part.type FROM inside JOIN pg_type AS t ON t.oid = inside.type
        CROSS JOIN LATERAL (
            SELECT t.typelem UNION ALL SELECT t.typbasetype
            UNION ALL SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = t.typrelid AND a.attnum > 0
            UNION ALL SELECT r.rngsubtype FROM pg_range AS r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
        ) AS part (type) WHERE part.type >= 16384
    )
    SELECT min(CASE WHEN t.oid = _untrusted_type_owner.type THEN s.problem
                    ELSE format('of type %s inside it: %s', format_type(t.oid, NULL), s.problem) END)
    FROM inside JOIN pg_type AS t ON t.oid = inside.type
    CROSS JOIN LATERAL (SELECT pgtrickle._untrusted_owner('pg_type', t.oid, t.typowner, t.typnamespace) AS problem)
        AS s
    WHERE s.problem IS NOT NULL
$$;

-- Descriptions of functions, operators and types by their names. Equal definitions mean the same.
CREATE OR REPLACE FUNCTION pgtrickle._describe_functions(functions text[])
RETURNS TABLE (function text, definition text, version text, problem text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT f.name,
           pgtrickle.stable_hash(concat_ws('|', l.lanname, p.prokind, p.provolatile, p.proisstrict, p.prosecdef,
                                           p.proretset, p.prorettype::regtype,
                                           p.proconfig, p.prosrc, p.probin, pg_get_function_sqlbody(p.oid),
                                           (SELECT e.extname || ' ' || e.extversion FROM pg_depend AS d
                                            JOIN pg_extension AS e ON e.oid = d.refobjid
                                            WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid
                                              AND d.deptype = 'e'))),
           concat_ws(':', p.oid, p.xmin),
           CASE WHEN p.oid IS NULL THEN 'there is none'
                WHEN p.prokind <> 'f' THEN 'it is an aggregate or a window function'
                WHEN NOT has_function_privilege(p.oid, 'EXECUTE') THEN format('role %I may not call it', current_user)
                ELSE pgtrickle._untrusted_owner('pg_proc', p.oid, p.proowner, p.pronamespace) END
    FROM unnest(functions) AS f (name)
    LEFT JOIN pg_proc AS p ON p.oid = to_regprocedure(f.name)
    LEFT JOIN pg_language AS l ON l.oid = p.prolang
    WHERE f.name !~ '^(operator|type) '
    UNION ALL
    SELECT f.name, pgtrickle.stable_hash(concat_ws('|', o.oprcode::regprocedure, o.oprresult::regtype)),
           concat_ws(':', o.oid, o.xmin),
           CASE WHEN o.oid IS NULL THEN 'there is none'
                ELSE pgtrickle._untrusted_owner('pg_operator', o.oid, o.oprowner, o.oprnamespace) END
    FROM unnest(functions) AS f (name)
    LEFT JOIN pg_operator AS o ON o.oid = to_regoperator(substr(f.name, length('operator ') + 1))
    WHERE f.name LIKE 'operator %'
    UNION ALL
    SELECT f.name,
           pgtrickle.stable_hash(concat_ws('|', t.typtype, t.typinput, t.typoutput, nullif(t.typelem, 0)::regtype,
               (SELECT string_agg(quote_literal(e.enumlabel), ',' ORDER BY e.enumsortorder) FROM pg_enum AS e
                WHERE e.enumtypid IN (t.oid, t.typelem)),
               (SELECT string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ','
                                  ORDER BY a.attnum) FROM pg_attribute AS a
                WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped),
               (SELECT concat_ws(',', r.rngsubtype::regtype, r.rngcanonical, r.rngsubdiff) FROM pg_range AS r
                WHERE t.oid IN (r.rngtypid, r.rngmultitypid)))),
           concat_ws(':', t.oid, t.xmin),
           CASE WHEN t.oid IS NULL THEN 'there is none'
                WHEN t.typtype = 'd' THEN 'it is a domain'
                ELSE pgtrickle._untrusted_type_owner(t.oid) END
    FROM unnest(functions) AS f (name)
    LEFT JOIN pg_type AS t ON t.oid = to_regtype(substr(f.name, length('type ') + 1))
    WHERE f.name LIKE 'type %'
$$;

-- The functions, operators and types that a query names and that are not built in.
CREATE OR REPLACE FUNCTION pgtrickle._user_objects(view regclass) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT f.fn::regprocedure::text FROM pgtrickle._functions_used(view) AS f WHERE f.nspname <> 'pg_catalog'
    UNION
    SELECT CASE d.refclassid WHEN 'pg_operator'::regclass THEN 'operator ' || d.refobjid::regoperator
                ELSE 'type ' || format_type(d.refobjid, NULL) END
    FROM pgtrickle._view_rules(view) AS r
    JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.rule
      AND d.refclassid IN ('pg_operator'::regclass, 'pg_type'::regclass)
$$;

-- The registered databases that a query reads.
CREATE OR REPLACE FUNCTION pgtrickle._source_databases(view regclass) RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT f.database FROM pgtrickle._resolved_sources(view) AS b
    JOIN pgtrickle.pgt_foreign_tables AS f ON f.relid = b.relation
$$;

-- Stores a registered database's description of functions, operators and types.
CREATE OR REPLACE FUNCTION pgtrickle._record_functions(caller name, database text, functions text[],
                                                       definitions text[], problems text[])
RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pgtrickle._require_database_use(caller, database); -- for a node, that is an administrator
    INSERT INTO pgtrickle.pgt_foreign_functions AS k (database, function, definition, problem)
    SELECT _record_functions.database, n.function, n.definition, n.problem
    FROM unnest(functions, definitions, problems) AS n (function, definition, problem)
    ON CONFLICT ON CONSTRAINT pgt_foreign_functions_pkey
    DO UPDATE SET definition = excluded.definition, problem = excluded.problem
    WHERE (k.definition, k.problem) IS DISTINCT FROM (excluded.definition, excluded.problem);
END
$$;

-- Why functions, operators or types that a query names cannot be used in all databases that it reads; NULL if they
-- can, or if it reads no other database. Raises if the role may not use one of the databases.
CREATE OR REPLACE FUNCTION pgtrickle._function_conflicts(view regclass) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    databases text[] := ARRAY(SELECT pgtrickle._source_databases(view));
BEGIN
    IF databases = '{}' THEN
        RETURN NULL;
    END IF;
    PERFORM pgtrickle._check_database_use(databases);
    IF EXISTS (SELECT FROM pgtrickle._view_rules(view) AS r WHERE r.tree LIKE '%{COERCETODOMAIN %') THEN
        RETURN 'the checks of a domain to which it casts';
    END IF;
    RETURN (
        SELECT string_agg(format('%s in database %I: %s', here.function, d.name,
                                 coalesce(k.problem, CASE WHEN k.function IS NULL THEN 'not compared yet'
                                                          ELSE 'it is not the same as here' END)),
                          '; ' ORDER BY here.function, d.name)
        FROM pgtrickle._describe_functions(ARRAY(SELECT pgtrickle._user_objects(view))) AS here
        CROSS JOIN unnest(databases) AS d (name)
        LEFT JOIN pgtrickle.pgt_foreign_functions AS k ON k.database = d.name AND k.function = here.function
        WHERE k.problem IS NOT NULL OR k.definition IS DISTINCT FROM here.definition);
END
$$;
