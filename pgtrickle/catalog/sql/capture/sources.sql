-- A source and everything below it: partitions at every level, inheritance children. In PL/pgSQL, which keeps its
-- plans, if the service calls it often.

CREATE OR REPLACE FUNCTION pgtrickle._partition_tree(source regclass) RETURNS SETOF oid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE tree (relid) AS (
        SELECT source::oid
        UNION
        SELECT i.inhrelid FROM tree AS t JOIN pg_inherits AS i ON i.inhparent = t.relid
    )
    SELECT relid FROM tree;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._descends(relation oid, ancestor oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (
        WITH RECURSIVE up (relid) AS (
            SELECT relation
            UNION
            SELECT i.inhparent FROM up AS u JOIN pg_inherits AS i ON i.inhrelid = u.relid
        )
        SELECT FROM up WHERE relid = ancestor
    );
END
$$;

-- Row triggers are used where statement triggers would not fire: a logical-replication worker fires only row triggers,
-- and a write through the parent fires only the parent's statement triggers, not those of the partition that is the
-- source.
CREATE OR REPLACE FUNCTION pgtrickle._capture_kind(source regclass) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_inherits WHERE inhrelid = source)
       OR EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid IN (SELECT pgtrickle._partition_tree(source))) THEN
        RETURN 'row';
    END IF;
    RETURN 'statement';
END
$$;

-- The columns that triggers see: not virtual generated columns, but the columns that they are computed from.
CREATE OR REPLACE FUNCTION pgtrickle._stored_columns(source regclass, columns smallint[]) RETURNS smallint[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
    SELECT coalesce(array_agg(DISTINCT found.attnum ORDER BY found.attnum), '{}')
    FROM (
        SELECT a.attnum FROM pg_attribute AS a
        WHERE a.attrelid = source AND a.attnum = ANY (columns) AND NOT a.attisdropped AND a.attgenerated <> 'v'
        UNION ALL
        SELECT d.refobjsubid::smallint
        FROM pg_attribute AS a
        JOIN pg_attrdef AS e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
        JOIN pg_depend AS d ON d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid
        WHERE a.attrelid = source AND a.attnum = ANY (columns) AND a.attgenerated = 'v'
          AND d.refclassid = 'pg_class'::regclass AND d.refobjid = source AND d.refobjsubid > 0
          AND d.refobjsubid <> a.attnum
    ) AS found);
END
$$;

-- The base type of a domain; other types are returned unchanged.
CREATE OR REPLACE FUNCTION pgtrickle._base_type(type oid) RETURNS oid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    base oid := type;
    below oid;
BEGIN
    LOOP
        SELECT t.typbasetype INTO STRICT below FROM pg_type AS t WHERE t.oid = base;
        EXIT WHEN below = 0;
        base := below;
    END LOOP;
    RETURN base;
END
$$;

-- The type of a buffer column, as DDL text: that of the source column, or the base type of a domain, so that its
-- constraints are not checked again on old values. Without length or precision, which may be altered before the next
-- refresh: a value that was stored in the source can be stored here.
CREATE OR REPLACE FUNCTION pgtrickle._buffer_type(source regclass, attribute smallint) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    col record;
    base record;
BEGIN
    SELECT pgtrickle._base_type(a.atttypid) AS type, a.attcollation INTO STRICT col
    FROM pg_attribute AS a WHERE a.attrelid = source AND a.attnum = attribute;
    SELECT t.typcollation, t.typnamespace INTO STRICT base FROM pg_type AS t WHERE t.oid = col.type;
    IF NOT has_schema_privilege(base.typnamespace, 'USAGE') THEN
        RAISE EXCEPTION 'the changes of % cannot be stored: role % may not use schema %, which contains type %',
                source, current_user, base.typnamespace::regnamespace, format_type(col.type, NULL)
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('Run: GRANT USAGE ON SCHEMA %s TO %I;', base.typnamespace::regnamespace, current_user);
    END IF;
    RETURN format_type(col.type, -1)
        || CASE WHEN col.attcollation IN (0, base.typcollation) THEN ''
                ELSE (SELECT format(' COLLATE %I.%I', n.nspname, c.collname) FROM pg_collation AS c
                      JOIN pg_namespace AS n ON n.oid = c.collnamespace WHERE c.oid = col.attcollation) END;
END
$$;
