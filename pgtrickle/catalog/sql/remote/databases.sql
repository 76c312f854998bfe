-- The registry of other databases whose tables queries can name, and of sets of them.

-- Raises unless a database, or a set if `of_set`, can be registered under this name. Registering it again is allowed.
CREATE OR REPLACE FUNCTION pgtrickle._require_free_name(name text, of_set boolean) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF to_regnamespace(quote_ident(name)) IS NOT NULL OR name = current_database()
       OR name !~ '^[a-z_][a-z0-9_]{0,30}$' THEN
        RAISE EXCEPTION 'a database cannot be registered as %', quote_ident(name)
            USING ERRCODE = 'invalid_name',
                  HINT = 'A name has up to 31 small letters, digits and _, and is not that '
                         'of a schema here or of this database.';
    ELSIF of_set AND EXISTS (SELECT FROM pgtrickle.pgt_databases AS d WHERE d.name = _require_free_name.name) THEN
        RAISE EXCEPTION '% is a registered database', quote_ident(name)
            USING ERRCODE = 'duplicate_object', HINT = 'Choose another name for the set.';
    ELSIF NOT of_set
          AND EXISTS (SELECT FROM pgtrickle.pgt_database_sets AS s WHERE s.name = _require_free_name.name) THEN
        RAISE EXCEPTION '% is a set of databases', quote_ident(name)
            USING ERRCODE = 'duplicate_object', HINT = 'Choose another name for the database.';
    END IF;
END
$$;

-- A password in a DSN could be read by everybody who may use the database, and would be in every dump. A variable of
-- the service's environment can take its place.
CREATE OR REPLACE FUNCTION pgtrickle._require_no_password(dsn text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on
AS $$
BEGIN
    -- As a keyword, as an option of a URI (whose letters may be written as %xx), or before the @ of one.
    IF regexp_replace(dsn, 'password\s*=\s*(''?)\$\{\w+\}\1(?=\s|$)', '', 'gi') ~* '(^|[\s?&''])(ssl)?password\s*='
       OR dsn ~* '^\s*postgres(ql)?://'
       AND (dsn ~ '^\s*\w+://[^/@]*:(?!\$\{\w+\}@)[^/]*@' OR dsn ~ '[?&][^=&]*%[^=&]*=') THEN
        RAISE EXCEPTION 'a registered DSN cannot contain a password'
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use libpq''s password file or service file, or password=${VARIABLE} '
                         'from the environment of the service.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._registered_databases() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'Registered databases: ' || coalesce(string_agg(name, ', ' ORDER BY name), 'none') || '.'
    FROM (SELECT name FROM pgtrickle.pgt_databases UNION ALL SELECT name || ' (a set)'
          FROM pgtrickle.pgt_database_sets) AS known
$$;

-- The identity of this database, whatever its name is.
CREATE OR REPLACE FUNCTION pgtrickle._database_identity() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (SELECT system_identifier FROM pg_control_system()) || '/'
           || (SELECT oid FROM pg_database WHERE datname = current_database())
$$;

CREATE OR REPLACE FUNCTION pgtrickle._is_registered(name text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle.pgt_databases AS d WHERE d.name = _is_registered.name)
$$;

CREATE OR REPLACE FUNCTION pgtrickle._is_database_set(name text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pgtrickle.pgt_database_sets AS s WHERE s.name = _is_database_set.name)
$$;

-- A LIKE pattern for a pattern of names, in which * stands for any characters and ? for one.
CREATE OR REPLACE FUNCTION pgtrickle._like_pattern(pattern text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT translate(regexp_replace(pattern, '([\\%_])', '\\\1', 'g'), '*?', '%_')
$$;

-- Whether a database of this name belongs to a set with these members and this pattern. In a view it runs with the
-- search_path of any caller.
CREATE OR REPLACE FUNCTION pgtrickle._is_set_member(database text, members text[], pattern text) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT coalesce(database OPERATOR(pg_catalog.=) ANY (members)
                    OR database OPERATOR(pg_catalog.~~) pgtrickle._like_pattern(pattern), false)
$$;

-- The registered databases that belong to a set. In a pattern, * stands for any characters and ? for one.
CREATE OR REPLACE FUNCTION pgtrickle._set_members(name text) RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.name FROM pgtrickle.pgt_databases AS d JOIN pgtrickle.pgt_database_sets AS s ON s.name = _set_members.name
    WHERE pgtrickle._is_set_member(d.name, s.members, s.pattern)
    ORDER BY d.name
$$;

CREATE OR REPLACE FUNCTION pgtrickle._register_database(name text, dsn text, node text, roles text[],
                                                        registered_by name DEFAULT current_user)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    other text;
BEGIN
    PERFORM pgtrickle._require_no_password(dsn);
    PERFORM pgtrickle._require_free_name(name, of_set => false);
    SELECT d.name INTO other FROM pgtrickle.pgt_databases AS d
    WHERE d.node = _register_database.node AND d.name <> _register_database.name;
    IF FOUND THEN
        RAISE EXCEPTION '% is the same database as %', quote_ident(name), quote_ident(other)
            USING ERRCODE = 'duplicate_object', HINT = format('Name its tables as %I.schema.table.', other);
    ELSIF node = pgtrickle._database_identity() THEN
        RAISE EXCEPTION '% is this database itself', quote_ident(name)
            USING ERRCODE = 'duplicate_object', HINT = 'Name its tables as schema.table.';
    END IF;
    INSERT INTO pgtrickle.pgt_databases AS d (name, dsn, node, roles, registered_by)
    VALUES (_register_database.name, _register_database.dsn, _register_database.node, _register_database.roles,
            _register_database.registered_by)
    ON CONFLICT ON CONSTRAINT pgt_databases_pkey
    DO UPDATE SET dsn = excluded.dsn, node = excluded.node, roles = excluded.roles;
    PERFORM pgtrickle._grant_stand_ins(name);
END
$$;

-- Raises if stream tables read one of these stand-ins for tables of a database or set.
CREATE OR REPLACE FUNCTION pgtrickle._require_no_readers(name text, stand_ins regclass[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    readers text;
BEGIN
    SELECT string_agg(DISTINCT format('%I.%I', s.pgt_schema, s.pgt_name), ', ') INTO readers
    FROM pgtrickle.pgt_dependencies AS d
    JOIN pgtrickle.pgt_stream_tables AS s USING (pgt_id)
    WHERE d.source_relid = ANY (stand_ins) OR d.through = ANY (stand_ins);
    IF readers IS NOT NULL THEN
        RAISE EXCEPTION 'stream tables read tables of %: %', quote_ident(name), readers
            USING ERRCODE = 'dependent_objects_still_exist', HINT = 'Drop those first.';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._remove_database(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    stand_in record;
BEGIN
    IF name LIKE '@%' THEN
        RAISE EXCEPTION '% is a node of the cluster', name
            USING ERRCODE = 'feature_not_supported', HINT = 'Citus removes it: citus_remove_node().';
    END IF;
    IF EXISTS (SELECT FROM pgtrickle.pgt_database_sets AS s WHERE s.name = _remove_database.name) THEN
        PERFORM pgtrickle._remove_set(name);
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM pgtrickle.pgt_databases AS d WHERE d.name = _remove_database.name) THEN
        RAISE EXCEPTION 'there is no registered database %', quote_ident(name)
            USING ERRCODE = 'undefined_object', HINT = pgtrickle._registered_databases();
    END IF;
    PERFORM pgtrickle._update_shards(m.relid,
                                     ARRAY(SELECT o.database FROM pgtrickle.pgt_shards AS o
                                           WHERE o.relid = m.relid AND o.database <> m.database))
    FROM pgtrickle.pgt_shards AS m WHERE m.database = name;
    UPDATE pgtrickle.pgt_database_sets AS s SET members = array_remove(s.members, _remove_database.name)
    WHERE _remove_database.name = ANY (s.members);
    PERFORM pgtrickle._require_no_readers(name,
                                          ARRAY(SELECT f.relid FROM pgtrickle.pgt_foreign_tables AS f
                                                WHERE f.database = name));
    FOR stand_in IN DELETE FROM pgtrickle.pgt_foreign_tables AS f WHERE f.database = name
        RETURNING f.relid, f.resolved_by LOOP
        CONTINUE WHEN stand_in.resolved_by IS NOT NULL; -- a foreign table, which its owner created
        EXECUTE format('DROP TABLE %s', stand_in.relid);
    END LOOP;
    PERFORM pgtrickle._drop_empty_schemas(name);
    DELETE FROM pgtrickle.pgt_databases AS d WHERE d.name = _remove_database.name;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._register_set(
    name text, pattern text, members text[], server_dsn text, roles text[], registered_by name DEFAULT current_user)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    unknown text;
    former text[] := ARRAY(SELECT pgtrickle._set_members(name));
BEGIN
    PERFORM pgtrickle._require_no_password(server_dsn);
    PERFORM pgtrickle._require_free_name(name, of_set => true);
    SELECT string_agg(quote_ident(m), ', ') INTO unknown FROM unnest(members) AS m
    WHERE NOT EXISTS (SELECT FROM pgtrickle.pgt_databases AS d WHERE d.name = m);
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'there is no registered database %', unknown
            USING ERRCODE = 'undefined_object', HINT = pgtrickle._registered_databases();
    END IF;
    INSERT INTO pgtrickle.pgt_database_sets AS s (name, pattern, members, server_dsn, roles, registered_by)
    VALUES (_register_set.name, _register_set.pattern, _register_set.members, _register_set.server_dsn,
            _register_set.roles, _register_set.registered_by)
    ON CONFLICT ON CONSTRAINT pgt_database_sets_pkey
    DO UPDATE SET pattern = excluded.pattern, members = excluded.members, server_dsn = excluded.server_dsn,
    roles = excluded.roles;
    -- Roles may use a set's members exactly as long as they may use the set.
    PERFORM pgtrickle._grant_stand_ins(d)
    FROM (SELECT name UNION SELECT unnest(former) UNION SELECT pgtrickle._set_members(name)) AS changed (d);
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._remove_set(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET client_min_messages = warning
AS $$
DECLARE
    stand_in record;
    former text[] := ARRAY(SELECT pgtrickle._set_members(name));
BEGIN
    PERFORM pgtrickle._require_no_readers(name,
                                          ARRAY(SELECT t.relid FROM pgtrickle.pgt_sharded_tables AS t
                                                WHERE t.database_set = name));
    FOR stand_in IN DELETE FROM pgtrickle.pgt_sharded_tables AS t WHERE t.database_set = name RETURNING t.relid LOOP
        EXECUTE format('DROP TABLE %s', stand_in.relid);
    END LOOP;
    PERFORM pgtrickle._drop_empty_schemas(name);
    DELETE FROM pgtrickle.pgt_database_sets AS s WHERE s.name = _remove_set.name;
    PERFORM pgtrickle._grant_stand_ins(member) FROM unnest(former) AS member;
END
$$;

CREATE OR REPLACE FUNCTION pgtrickle._record_set_problem(name text, problem text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE pgtrickle.pgt_database_sets AS s SET problem = _record_set_problem.problem
    WHERE s.name = _record_set_problem.name AND s.problem IS DISTINCT FROM _record_set_problem.problem;
END
$$;
