-- What PostgreSQL knows about a defining query, from the view that stores it and the views it reads.

-- The rules of the view and of all views it reads, with the role whose privileges PostgreSQL checks there.
CREATE OR REPLACE FUNCTION pgtrickle._view_rules(view regclass)
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

-- The tables that the query reads, and the columns it uses of each: none for count(*), all for a whole row. pg_depend
-- does not list system catalogs, so the tables come from the query tree.
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
          FROM pgtrickle._view_rules(view) AS r
          CROSS JOIN LATERAL regexp_matches(r.tree, ':rtekind 0 :relid (\d+)', 'g') AS found) AS read
    JOIN pg_class AS c ON c.oid = read.relid AND c.relkind <> 'v'
    GROUP BY c.oid, c.relkind, c.reltype
$$;

CREATE OR REPLACE FUNCTION pgtrickle._functions_used(view regclass)
RETURNS TABLE (fn oid, provolatile "char", proname name, nspname name)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT DISTINCT p.oid, p.provolatile, p.proname, n.nspname
    FROM pgtrickle._view_rules(view) AS r
    CROSS JOIN LATERAL regexp_matches(r.tree, ':(?:funcid|opfuncid|aggfnoid|winfnoid|tsmhandler) (\d+)', 'g') AS found
    JOIN pg_proc AS p ON p.oid = found[1]::oid
    JOIN pg_namespace AS n ON n.oid = p.pronamespace
$$;

-- Whether the query uses the current time: CURRENT_DATE and similar (the first nine of SQLValueFunctionOp), now(),
-- age(x).
CREATE OR REPLACE FUNCTION pgtrickle._time_dependent(view regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle._view_rules(view) AS r WHERE r.tree ~ '\{SQLVALUEFUNCTION :op [0-8] ')
        OR EXISTS (SELECT FROM pgtrickle._functions_used(view) AS f JOIN pg_proc AS p ON p.oid = f.fn
                   WHERE f.nspname = 'pg_catalog'
                     AND (f.proname IN ('now', 'statement_timestamp', 'transaction_timestamp')
                          OR (f.proname = 'age' AND p.pronargs = 1 AND p.provolatile = 's')))
$$;

-- Warns at creation about the cost of a query over the current time.
CREATE OR REPLACE FUNCTION pgtrickle._warn_time_dependent(view regclass, storage regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pgtrickle._time_dependent(view) THEN
        RAISE WARNING 'the query of stream table % depends on the current time: it is computed '
                      'in full whenever its schedule is due, even if no source has changed', storage
            USING HINT = 'Give it the longest acceptable schedule, or store the time in a table that the query reads.';
    END IF;
END
$$;

-- The columns that identify the rows of a table, in index order: its primary key, or another unique index without
-- NULLs.
CREATE OR REPLACE FUNCTION pgtrickle._table_key(relation oid) RETURNS name[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(a.attname ORDER BY k.ord)
    FROM pg_index AS i
    CROSS JOIN LATERAL unnest(i.indkey[0 : i.indnkeyatts - 1]) WITH ORDINALITY AS k (attnum, ord)
    JOIN pg_attribute AS a ON a.attrelid = relation AND a.attnum = k.attnum
    WHERE i.indexrelid = (
        SELECT u.indexrelid
        FROM pg_index AS u
        WHERE u.indrelid = relation AND u.indisunique AND u.indimmediate AND u.indisvalid AND u.indpred IS NULL
          AND u.indexprs IS NULL
          AND (u.indnullsnotdistinct OR NOT EXISTS (
              SELECT FROM unnest(u.indkey[0 : u.indnkeyatts - 1]) AS x (attnum)
              JOIN pg_attribute AS ua ON ua.attrelid = relation AND ua.attnum = x.attnum AND NOT ua.attnotnull))
        ORDER BY u.indisprimary DESC, u.indnkeyatts, u.indexrelid
        LIMIT 1)
      -- A child may repeat its parent's keys.
      AND NOT EXISTS (SELECT FROM pg_inherits AS h JOIN pg_class AS c ON c.oid = h.inhparent
                      WHERE h.inhparent = relation AND c.relkind = 'r')
$$;

-- The key of a query's result, if its shape shows it beyond doubt; otherwise NULL. Python and the command line find
-- the keys of all queries that are maintained differentially (pgtrickle/ivm/unique_key.py), and agree with this
-- function: for a query of one table the columns of that table's key, for one that groups by columns these columns.
-- Each has to be in the result exactly once.
CREATE OR REPLACE FUNCTION pgtrickle._find_key(view regclass) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    tree text := (SELECT r.tree FROM pgtrickle._view_rules(view) AS r WHERE r.relation = view);
    grouped integer[] := ARRAY(SELECT m[1]::integer
                               FROM regexp_matches(substring(tree FROM ':groupClause \(([^()]*)\)'),
                                                   ':tleSortGroupRef (\d+)', 'g') AS m);
    source oid;
    source_key smallint[] := '{}';
    found smallint[];
BEGIN
    -- FROM may contain tables, joins (2) and groups (9).
    IF tree ~ '\{(SUBLINK|COMMONTABLEEXPR|SETOPERATIONSTMT|WINDOWFUNC|GROUPINGSET) |:rtekind '
              '[1345678] |:hasTargetSRFs true|:tablesample \{'
       OR tree !~ ':distinctClause <>' OR tree !~ ':limitOffset <> :limitCount <>' THEN
        RETURN NULL;
    ELSIF grouped = '{}' AND tree ~ ':hasAggs true' THEN
        RETURN '{}'; -- always one row
    ELSIF grouped = '{}' THEN
        SELECT m[1]::oid INTO source FROM regexp_matches(tree, ':rtekind 0 :relid (\d+)', 'g') AS m
        WHERE m[1]::oid <> view; -- before PostgreSQL 16 the view itself is among them
        source_key := ARRAY(SELECT a.attnum FROM pg_attribute AS a
                            WHERE a.attrelid = source AND a.attname = ANY (pgtrickle._table_key(source)));
        IF source_key = '{}' OR tree ~ ':rtekind 2 ' OR pgtrickle._is_stand_in(source)
           OR pgtrickle._is_distributed(source)
           OR (SELECT count(*) FROM regexp_matches(tree, ':rtekind 0 :relid (\d+)', 'g') AS m
               WHERE m[1]::oid <> view) <> 1 THEN
            RETURN NULL;
        END IF;
    END IF;
    -- Columns of the result that are columns of tables.
    WITH passed AS MATERIALIZED (
        SELECT m[1]::smallint AS place, m[2]::integer AS ref, m[3]::oid AS relation, m[4]::smallint AS number
        FROM regexp_matches(tree,
                            ':resno (\d+) :resname (?!<>)\S+ :ressortgroupref (\d+) :resorigtbl '
                            '(\d+) :resorigcol (\d+) :resjunk false', 'g') AS m
        WHERE m[3] <> '0' AND m[4] <> '0'
    )
    SELECT array_agg(p.place) INTO found FROM passed AS p
    WHERE CASE WHEN grouped = '{}' THEN p.relation = source AND p.number = ANY (source_key)
               ELSE p.ref = ANY (grouped) END
      AND NOT EXISTS (SELECT FROM passed AS o WHERE (o.relation, o.number) = (p.relation, p.number)
                        AND o.place <> p.place);
    IF cardinality(found) IS DISTINCT FROM (CASE WHEN grouped = '{}' THEN cardinality(source_key)
                                                 ELSE cardinality(grouped) END)
       -- The key must be indexable.
       OR EXISTS (SELECT FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
                  WHERE a.attrelid = view AND a.attnum = ANY (found) AND NOT (
                      t.typtype IN ('d', 'e', 'r', 'm') OR t.typcategory = 'A' OR t.oid = 'varchar'::regtype
                          OR EXISTS (
                          SELECT FROM pg_opclass AS o JOIN pg_am AS m ON m.oid = o.opcmethod AND m.amname = 'btree'
                          WHERE o.opcdefault AND o.opcintype = t.oid))) THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(SELECT a.attname::text FROM pg_attribute AS a WHERE a.attrelid = view AND a.attnum = ANY (found)
                 ORDER BY a.attnum);
END
$$;

-- The labels of all enums among these types or inside them: renaming a label changes the values of rows without
-- writing to them. In PL/pgSQL, which keeps its plan.
CREATE OR REPLACE FUNCTION pgtrickle._enum_labels(types oid[]) RETURNS jsonb
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
        SELECT coalesce(jsonb_object_agg(e.oid, e.enumlabel), '{}') FROM inside
        JOIN pg_enum AS e ON e.enumtypid = inside.type);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._column_names(relation regclass, columns smallint[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
    WHERE attrelid = relation AND attnum = ANY (columns)
$$;

CREATE OR REPLACE FUNCTION pgtrickle._row_security_applies(role oid, relation regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
           AND (c.relforcerowsecurity OR NOT pg_has_role(r.oid, c.relowner, 'USAGE'))
    FROM pg_class AS c CROSS JOIN pg_roles AS r WHERE c.oid = relation AND r.oid = role
$$;

-- Whether a query runs, or may run, code that is not built in. Everything user-defined counts, except tables and
-- collations: an operator over a built-in function may have a negator that the planner calls instead, domains have
-- checks, and casts to text or json, which printing a value uses, can be created by the type's owner. Built-in
-- VOLATILE functions count as well: some run a text as a query. A view may get one after it was checked.
CREATE OR REPLACE FUNCTION pgtrickle._runs_user_code(view regclass) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle._functions_used(view) AS f
                   WHERE f.nspname <> 'pg_catalog' OR f.provolatile = 'v')
        OR EXISTS (SELECT FROM pgtrickle._view_rules(view) AS r
                   JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.rule
                   WHERE d.refobjid >= 16384 AND d.refclassid NOT IN ('pg_class'::regclass, 'pg_collation'::regclass))
        OR EXISTS (SELECT FROM pgtrickle._view_rules(view) AS r
                   CROSS JOIN LATERAL regexp_matches(r.tree, '\m\d{5,10}\M', 'g') AS found
                   JOIN pg_type AS t ON t.oid::bigint = found[1]::bigint WHERE t.oid >= 16384)
        OR EXISTS (SELECT FROM pgtrickle._sources(view) AS s
                   JOIN pg_attribute AS a ON a.attrelid = s.relation AND a.attnum > 0
                   WHERE NOT a.attisdropped AND a.atttypid >= 16384)
        -- A virtual generated column is computed wherever its table's changes are read. PostgreSQL allows operators of
        -- users in it, but not their functions.
        OR EXISTS (SELECT FROM pgtrickle._sources(view) AS s
                   JOIN pg_attribute AS a ON a.attrelid = s.relation AND a.attgenerated = 'v'
                   JOIN pg_attrdef AS e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
                   JOIN pg_depend AS d ON d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid
                   WHERE d.refobjid >= 16384 AND d.refclassid NOT IN ('pg_class'::regclass, 'pg_collation'::regclass))
$$;

-- Raises an error if the query cannot define a stream table.
CREATE OR REPLACE FUNCTION pgtrickle._check_query(view regclass) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    source record;
    reader record;
    missing smallint[];
    offending text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = view AND a.attnum > 0) THEN
        RAISE EXCEPTION 'the query returns no columns'
            USING ERRCODE = 'invalid_table_definition', HINT = 'Name at least one column after SELECT.';
    END IF;
    SELECT string_agg(quote_ident(attname), ', ') INTO offending FROM pg_attribute
    WHERE attrelid = view AND attnum > 0 AND attname LIKE '\_\_pgt\_%';
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'column name % is reserved', offending
            USING ERRCODE = 'reserved_name',
                  HINT = 'Names that begin with __pgt_ are pgtrickle''s. Give it another one with AS.';
    END IF;
    -- The names of objects are printed according to search_path, and a refresh has its own (decision 019). For types
    -- it does not matter: nearly all are built in. A value of such a type that is not cast is the same everywhere.
    SELECT string_agg(DISTINCT m[1]::oid::regtype::text, ', ') INTO offending
    FROM pgtrickle._view_rules(view) AS r
    CROSS JOIN LATERAL regexp_matches(r.tree,
                                      '\{COERCEVIAIO :arg \{(?:VAR :varno \d+ :varattno -?\d+ '
                                      ':vartype|RELABELTYPE :arg \{[^{}]*\} :resulttype'
                                              '|FUNCEXPR :funcid \d+ :funcresulttype|CONST :consttype) (\d+)',
                                              'g') AS m
    WHERE m[1]::oid IN ('regclass'::regtype, 'regproc'::regtype, 'regprocedure'::regtype, 'regoper'::regtype,
                        'regoperator'::regtype,
                        'regcollation'::regtype, 'regconfig'::regtype, 'regdictionary'::regtype);
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'the query casts % to text, which depends on the search_path of the reader', offending
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Leave out the cast: values of that type are kept as they are. Or '
                         'keep the name in a column of a table.';
    END IF;
    SELECT string_agg(format('%s', fn::regprocedure), ', ') INTO offending
    FROM pgtrickle._functions_used(view) WHERE provolatile = 'v';
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'the query calls VOLATILE functions: %', offending
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Its result would differ each time. Store such values in a table, '
                         'or declare the function STABLE or IMMUTABLE if it is.';
    END IF;
    SELECT string_agg(DISTINCT fn::regprocedure::text, ', ') INTO offending
    FROM pgtrickle._functions_used(view) AS f JOIN pg_class AS c ON c.oid = view
    WHERE NOT has_function_privilege(c.relowner, f.fn, 'EXECUTE');
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'role % may not call %', (SELECT c.relowner::regrole FROM pg_class AS c WHERE c.oid = view),
                offending
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('Ask its owner to run: GRANT EXECUTE ON FUNCTION %s TO %s;', offending,
                                (SELECT c.relowner::regrole FROM pg_class AS c WHERE c.oid = view));
    END IF;
    offending := pgtrickle._function_conflicts(view);
    IF offending IS NOT NULL THEN
        RAISE EXCEPTION 'the query uses functions, operators or types that are not the same '
                        'in all databases that it reads: %', offending
            USING ERRCODE = 'feature_not_supported',
                  HINT = 'Create them there as they are here, owned by the role that reads '
                         'there; `pgtrickle create` and Python compare them.'
                         ' Or compute them in the database of their arguments: a stream table there can be read here.';
    END IF;
    IF EXISTS (SELECT FROM pgtrickle._view_rules(view) AS r WHERE r.tree LIKE '%{ROWMARKCLAUSE %') THEN
        RAISE EXCEPTION 'the query locks rows (FOR UPDATE or FOR SHARE)'
            USING ERRCODE = 'feature_not_supported', HINT = 'Remove the locking clause.';
    END IF;
    FOR source IN
        SELECT s.*, c.relnamespace::regnamespace::text AS schema
        FROM pgtrickle._sources(view) AS s JOIN pg_class AS c ON c.oid = s.relation
    LOOP
        IF source.schema IN ('pg_catalog', 'information_schema', 'pg_toast', 'pgtrickle', 'pgtrickle_changes',
                             'pgtrickle_views') THEN
            RAISE EXCEPTION 'the query reads %, a system table', source.relation
                USING ERRCODE = 'feature_not_supported',
                      HINT = 'The changes of system tables cannot be captured. Use a plain '
                             'view or a materialized view.';
        ELSIF source.kind NOT IN ('r', 'p', 'f', 'm') THEN
            RAISE EXCEPTION 'the query reads %, which is not a table', source.relation
                USING ERRCODE = 'wrong_object_type',
                      HINT = 'Sources are tables, foreign tables, materialized views and views of these.';
        END IF;
        FOR reader IN SELECT r.oid, r.rolname, r.rolsuper, r.rolbypassrls FROM pg_roles AS r
            WHERE r.oid = ANY (source.checked_as) LOOP
            IF pgtrickle._row_security_applies(reader.oid, source.relation) THEN
                RAISE EXCEPTION 'row-level security on % applies to role %', source.relation, reader.rolname
                    USING ERRCODE = 'feature_not_supported',
                          HINT = 'Create the stream table as a role that sees all rows, and '
                                 'put the policies on the stream table.';
            END IF;
            CONTINUE WHEN has_table_privilege(reader.oid, source.relation, 'SELECT');
            missing := ARRAY(SELECT a FROM unnest(source.columns) AS a
                             WHERE NOT has_column_privilege(reader.oid, source.relation, a, 'SELECT'));
            IF missing <> '{}' OR NOT has_any_column_privilege(reader.oid, source.relation, 'SELECT') THEN
                RAISE EXCEPTION 'role % may not read % of %', quote_ident(reader.rolname),
                        coalesce('column ' || pgtrickle._column_names(source.relation, missing), 'any column'),
                        source.relation
                    USING ERRCODE = 'insufficient_privilege',
                          HINT = format('Ask its owner to run: GRANT SELECT ON %s TO %I;', source.relation,
                                        reader.rolname);
            END IF;
        END LOOP;
    END LOOP;
END
$$;
