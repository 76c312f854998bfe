-- Protection of pgtrickle's tables that hold other roles' rows: against running code, and against being read.

-- Revokes what default privileges of the installing role granted to others, and excludes columns of user-defined types
-- from ANALYZE: like autovacuum, it runs functions of a range type with the rights of the table's owner.
CREATE OR REPLACE FUNCTION pgtrickle._protect(tab regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    exposed name;
    stranger text;
BEGIN
    FOR exposed IN SELECT a.attname FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid AND c.relkind = 'r'
                   WHERE a.attrelid = tab AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
                     AND coalesce(a.attstattarget, -1) <> 0 LOOP
        EXECUTE format('ALTER TABLE ONLY %s ALTER COLUMN %I SET STATISTICS 0', tab, exposed);
    END LOOP;
    FOR stranger IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
                    FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
                    WHERE c.oid = tab AND a.grantee <> c.relowner
                      AND (a.grantee = 0 OR pg_get_userbyid(a.grantee) <> pgtrickle._service_role()) LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', tab, stranger);
    END LOOP;
END
$$;
