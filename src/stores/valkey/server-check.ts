import { BatonError } from '../../core/errors.ts';

/** Oldest versions that know what the scripts use. */
const OLDEST: Readonly<Record<string, string>> = { Redis: '7.0', Valkey: '7.2' };

/**
 * Looks whether a server can be used, and what about it an operator should change. The client passes over a database that
 * the server does not have, and would go on in another store's.
 */
export async function checkServer(
  client: {
    readonly info: (section: string) => Promise<string>;
    readonly config: (verb: 'GET', parameter: string) => Promise<unknown>;
    readonly select: (db: number) => Promise<unknown>;
  },
  db: number,
): Promise<{ readonly refusal?: BatonError; readonly warnings: readonly string[] }> {
  const info = await client.info('server');
  const valkey = /valkey_version:([\w.]+)/.exec(info)?.[1];
  const name = valkey === undefined ? 'Redis' : 'Valkey';
  const version = valkey ?? /redis_version:([\w.]+)/.exec(info)?.[1] ?? '';
  if (!isAtLeast(version, OLDEST[name] ?? '')) {
    const message = `the store's server is ${name} ${version}; it needs Redis ${OLDEST['Redis']} or Valkey ${OLDEST['Valkey']}, or newer`;
    return { refusal: new BatonError({ reason: 'STORE_UNAVAILABLE', message }), warnings: [] };
  }
  const lacksDb = db > 0 && (await client.select(db).then(() => false, isOutOfRange));
  if (lacksDb) {
    const message = `the store's server has no database ${db}; name another one at the end of its URL, or none`;
    return { refusal: new BatonError({ reason: 'STORE_UNAVAILABLE', message }), warnings: [] };
  }
  const policy = await setting(client, 'maxmemory-policy');
  if (policy === undefined || policy === 'noeviction') return { warnings: [] };
  const message = `the valkey server may evict any key (maxmemory-policy ${policy})`;
  // A put whose answer was evicted would be stored again when it is repeated, though its handle was given away.
  if ((await setting(client, 'maxmemory')) !== '0') {
    const why = `${message}: a handle could be given twice; set maxmemory-policy to noeviction`;
    return { refusal: new BatonError({ reason: 'STORE_UNAVAILABLE', message: why }), warnings: [] };
  }
  return { warnings: [`${message} once it is given a maxmemory; set the policy to noeviction`] };
}

/** Undefined where CONFIG is forbidden, as hosted servers do. */
async function setting(
  client: { readonly config: (verb: 'GET', parameter: string) => Promise<unknown> },
  name: string,
): Promise<string | undefined> {
  try {
    const reply = await client.config('GET', name);
    return Array.isArray(reply) ? String(reply[1]) : undefined;
  } catch {
    return undefined;
  }
}

/** Whatever else keeps a SELECT from being answered is the server's being away. */
function isOutOfRange(error: unknown): boolean {
  if (error instanceof Error && /out of range|invalid DB/i.test(error.message)) return true;
  throw error;
}

function isAtLeast(version: string, oldest: string): boolean {
  const [major = 0, minor = 0] = version.split('.').map(Number);
  const [leastMajor = 0, leastMinor = 0] = oldest.split('.').map(Number);
  return major > leastMajor || (major === leastMajor && minor >= leastMinor);
}
