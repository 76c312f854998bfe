-- What PostgreSQL knows about a defining query, read from the view that keeps it and the views below that.

-- The rules of the view and of all views it reads, with the role whose rights PostgreSQL checks there.
CREATE OR REPLACE FUNCTION pgtrickle._rules(view regclass)
RETURNS TABLE (rule oid, relation oid, tree text, checked_as oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    WITH RECURSIVE walk AS (
        SELECT r.oid AS rule, r.ev_class AS relation, r.ev_action::text AS tree, c.relowner AS checked_as
        FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
        WHERE r.ev_class = view AND r.rulename = '_RETURN'
        UNION
        SELECT r.oid, r.ev_class, r.ev_action::text,
               CASE WHEN EXISTS (SELECT FROM pg_options_to_table(c.reloptions)
                                 WHERE option_name = 'security_invoker' AND option_value::boolean)
                    THEN w.checked_as ELSE c.relowner END
        FROM walk AS w
        CROSS JOIN LATERAL regexp_matches(w.tree, ':rtekind 0 :relid (\d+)', 'g') AS found
        JOIN pg_class AS c ON c.oid = found[1]::oid AND c.relkind = 'v'
        JOIN pg_rewrite AS r ON r.ev_class = c.oid AND r.rulename = '_RETURN'
        WHERE c.oid <> w.relation
    )
    SELECT rule, relation, tree, checked_as FROM walk
$$;

-- The tables that the query reads, and the columns it uses of each: none for count(*), all for a whole row.
-- pg_depend does not name system catalogs, so the tables come from the query tree.
CREATE OR REPLACE FUNCTION pgtrickle._sources(view regclass)
RETURNS TABLE (relation regclass, kind "char", columns smallint[], checked_as oid[])
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT c.oid::regclass, c.relkind,
           ARRAY(SELECT DISTINCT a.attnum FROM pg_attribute AS a
                 WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                   AND (bool_or(read.tree ~ format(':varattno 0 :vartype %s ', c.reltype))
                        OR EXISTS (SELECT FROM pg_depend AS d
                                   WHERE d.classid = 'pg_rewrite'::regclass AND d.objid = ANY (array_agg(read.rule))
                                     AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid
                                     AND d.refobjsubid = a.attnum))
                 ORDER BY a.attnum),
           array_agg(DISTINCT read.checked_as)
    FROM (SELECT DISTINCT r.rule, r.tree, r.checked_as, found[1]::oid AS relid
          FROM pgtrickle._rules(view) AS r
          CROSS JOIN LATERAL regexp_matches(r.tree, ':rtekind 0 :relid (\d+)', 'g') AS found) AS read
    JOIN pg_class AS c ON c.oid = read.relid AND c.relkind <> 'v'
    GROUP BY c.oid, c.relkind, c.reltype
$$;

CREATE OR REPLACE FUNCTION pgtrickle._functions_used(view regclass)
RETURNS TABLE (fn oid, provolatile "char", proname name, nspname name)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT p.oid, p.provolatile, p.proname, n.nspname
    FROM pgtrickle._rules(view) AS r
    CROSS JOIN LATERAL regexp_matches(r.tree, ':(?:funcid|opfuncid|aggfnoid|winfnoid|tsmhandler) (\d+)', 'g') AS found
    JOIN pg_proc AS p ON p.oid = found[1]::oid
    JOIN pg_namespace AS n ON n.oid = p.pronamespace
$$;

-- Whether the query asks for the time: CURRENT_DATE and its kin (the first nine of SQLValueFunctionOp), now(), age(x).
CREATE OR REPLACE FUNCTION pgtrickle._time_dependent(view regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle._rules(view) AS r WHERE r.tree ~ '\{SQLVALUEFUNCTION :op [0-8] ')
        OR EXISTS (SELECT FROM pgtrickle._functions_used(view) AS f JOIN pg_proc AS p ON p.oid = f.fn
                   WHERE f.nspname = 'pg_catalog'
                     AND (f.proname IN ('now', 'statement_timestamp', 'transaction_timestamp')
                          OR (f.proname = 'age' AND p.pronargs = 1 AND p.provolatile = 's')))
$$;

-- The labels of all enums that are among these types or in them: renaming one changes values of rows that nobody writes to. PL/pgSQL, because
-- it keeps its plan.
CREATE OR REPLACE FUNCTION pgtrickle._labels(types oid[]) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF types = '{}' THEN
        RETURN '{}';
    END IF;
    RETURN (
        WITH RECURSIVE inside AS (
            SELECT type FROM unnest(types) AS type
            UNION
            SELECT part.type
            FROM inside
            JOIN pg_type AS t ON t.oid = inside.type
            CROSS JOIN LATERAL (
                SELECT t.typelem UNION ALL SELECT t.typbasetype
                UNION ALL SELECT a.atttypid FROM pg_attribute AS a WHERE a.attrelid = t.typrelid AND a.attnum > 0
                UNION ALL SELECT r.rngsubtype FROM pg_range AS r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
            ) AS part (type)
            WHERE part.type >= 16384 -- PostgreSQL's own have none
        )
        SELECT coalesce(jsonb_object_agg(e.oid, e.enumlabel), '{}') FROM inside JOIN pg_enum AS e ON e.enumtypid = inside.type);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._column_names(relation regclass, columns smallint[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
    WHERE attrelid = relation AND attnum = ANY (columns)
$$;

-- Raises what makes the query unfit for a stream table.
CREATE OR REPLACE FUNCTION pgtrickle._check_query(view regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source record;
    reader record;
    missing smallint[];
    offending text;
BEGIN
    SELECT string_agg(quote_ident(attname), ', ') INTO offending FROM pg_attribute
    WHERE attrelid = view AND attnum > 0 AND attname LIKE '\_\_pgt\_%';
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'column name % is reserved', offending
            USING ERRCODE = 'reserved_name', HINT = 'Names that begin with __pgt_ are pgtrickle''s. Give it another one with AS.';
    END IF;
    SELECT string_agg(format('%s', fn::regprocedure), ', ') INTO offending
    FROM pgtrickle._functions_used(view) WHERE provolatile = 'v';
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'the query calls VOLATILE functions: %', offending
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Its result would differ each time. Store such values in a table, or declare the function STABLE or IMMUTABLE if it is.';
    END IF;
    SELECT string_agg(DISTINCT fn::regprocedure::text, ', ') INTO offending
    FROM pgtrickle._functions_used(view) AS f JOIN pg_class AS c ON c.oid = view WHERE NOT has_function_privilege(c.relowner, f.fn, 'EXECUTE');
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'role % may not call %', (SELECT c.relowner::regrole FROM pg_class AS c WHERE c.oid = view), offending
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('Ask its owner to run: GRANT EXECUTE ON FUNCTION %s TO %s;', offending,
                                (SELECT c.relowner::regrole FROM pg_class AS c WHERE c.oid = view));
    END IF;
    offending := pgtrickle._function_conflicts(view);
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'the query calls functions that are not the same in all databases that it reads: %', offending
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Create them there as they are here, owned by the role that reads there; `pgtrickle create` and Python compare them.'
                         ' Or compute them in the database of their arguments: a stream table there can be read here.';
    END IF;
    IF EXISTS (SELECT FROM pgtrickle._rules(view) AS r WHERE r.tree LIKE '%{ROWMARKCLAUSE %') THEN
        RAISE EXCEPTION 'the query locks rows (FOR UPDATE or FOR SHARE)'
            USING ERRCODE = 'feature_not_supported', HINT = 'Remove the locking clause.';
    END IF;
    FOR source IN
        SELECT s.*, c.relnamespace::regnamespace::text AS schema, c.relrowsecurity, c.relforcerowsecurity, c.relowner
        FROM pgtrickle._sources(view) AS s JOIN pg_class AS c ON c.oid = s.relation
    LOOP
        IF source.schema IN ('pg_catalog', 'information_schema', 'pg_toast', 'pgtrickle', 'pgtrickle_changes', 'pgtrickle_views') THEN
            RAISE EXCEPTION 'the query reads %, a system table', source.relation
                USING ERRCODE = 'feature_not_supported',
                      HINT = 'The changes of system tables cannot be captured. Use a plain view or a materialized view.';
        ELSIF source.kind NOT IN ('r', 'p', 'f', 'm') THEN
            RAISE EXCEPTION 'the query reads %, which is not a table', source.relation
                USING ERRCODE = 'wrong_object_type', HINT = 'Sources are tables, foreign tables, materialized views and views of these.';
        END IF;
        FOR reader IN SELECT r.oid, r.rolname, r.rolsuper, r.rolbypassrls FROM pg_roles AS r WHERE r.oid = ANY (source.checked_as) LOOP
            IF source.relrowsecurity AND NOT reader.rolsuper AND NOT reader.rolbypassrls
               AND (source.relforcerowsecurity OR NOT pg_has_role(reader.oid, source.relowner, 'USAGE')) THEN
                RAISE EXCEPTION 'row-level security on % applies to role %', source.relation, reader.rolname
                    USING ERRCODE = 'feature_not_supported',
                          HINT = 'Let a role create the stream table that sees all rows, and put the policies on the stream table.';
            END IF;
            CONTINUE WHEN has_table_privilege(reader.oid, source.relation, 'SELECT');
            missing := ARRAY(SELECT a FROM unnest(source.columns) AS a WHERE NOT has_column_privilege(reader.oid, source.relation, a, 'SELECT'));
            IF missing <> '{}' OR NOT has_any_column_privilege(reader.oid, source.relation, 'SELECT') THEN
                RAISE EXCEPTION 'role % may not read % of %', quote_ident(reader.rolname),
                        coalesce('column ' || pgtrickle._column_names(source.relation, missing), 'any column'), source.relation
                    USING ERRCODE = 'insufficient_privilege',
                          HINT = format('Ask its owner to run: GRANT SELECT ON %s TO %I;', source.relation, reader.rolname);
            END IF;
        END LOOP;
    END LOOP;
END
$$;
