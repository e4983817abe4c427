/** Tenant of requests without a credential, where none is needed. */
export const ANONYMOUS = 'anonymous';

const PREFIX = 'cred-';

/** Tenant of each key by the key's SHA-256 in lower-case hex; the keys themselves are nowhere. */
export type ApiKeys = ReadonlyMap<string, string>;

/** A file of keys, or each mistake in it; messages never repeat what a line holds. */
export type ApiKeysResult =
  | { readonly kind: 'ok'; readonly keys: ApiKeys }
  | { readonly kind: 'error'; readonly problems: readonly { readonly where: string; readonly message: string }[] };

const LINE = /^(\S+)[ \t]+sha256:([0-9a-f]{64})$/i;
const TENANT = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

/** Reads `<tenant> sha256:<64 hex>` lines; blank lines and what follows a `#` do not count. */
export function parseApiKeys(text: string, fileName: string): ApiKeysResult {
  const keys = new Map<string, string>();
  const lineOf = new Map<string, number>();
  const problems: { readonly where: string; readonly message: string }[] = [];
  for (const [index, raw] of text
    .replace(/^\uFEFF/, '')
    .split('\n')
    .entries()) {
    const line = raw.replace(/(^|\s)#.*$/s, '').trim();
    if (line === '') continue;
    const where = `${fileName}:${index + 1}`;
    const [, tenant = '', digest = ''] = LINE.exec(line) ?? [];
    const message = mistakeIn(tenant, digest, lineOf);
    if (message !== undefined) {
      problems.push({ where, message });
      continue;
    }
    keys.set(digest.toLowerCase(), tenant);
    lineOf.set(digest.toLowerCase(), index + 1);
  }
  if (problems.length > 0) return { kind: 'error', problems };
  // Almost surely a slip: every request would be refused.
  if (keys.size === 0) return { kind: 'error', problems: [{ where: fileName, message: 'has no key' }] };
  return { kind: 'ok', keys };
}

function mistakeIn(tenant: string, digest: string, lineOf: ReadonlyMap<string, number>): string | undefined {
  if (digest === '') {
    return 'expected a tenant and a hash, "team-a sha256:<64 hex digits>"; baton hash-key makes the hash of a key';
  }
  if (!TENANT.test(tenant)) {
    return 'expected a tenant of at most 64 letters, digits and ._-, beginning with a letter or digit';
  }
  // These are what clients without keys get; a named tenant must not be one that others can take.
  if (tenant === ANONYMOUS || tenant.startsWith(PREFIX)) {
    return `a tenant cannot be called "${ANONYMOUS}" or begin with "${PREFIX}"; choose another name`;
  }
  const first = lineOf.get(digest.toLowerCase());
  return first === undefined ? undefined : `this key is already in line ${first}; a key belongs to one tenant`;
}

/** The key in `Authorization: Bearer KEY`, each byte one character as Node gives it; undefined for anything else. */
export function bearerKey(authorization: string | undefined): string | undefined {
  return /^bearer +([^ \t]+)$/i.exec(authorization ?? '')?.[1];
}

/** What identifies a client where no keys are configured: its bearer key, else its whole Authorization header. */
export function presentedCredential(authorization: string | undefined): string | undefined {
  return authorization === '' ? undefined : (bearerKey(authorization) ?? authorization);
}

/** Tenant of an unchecked credential by its SHA-256 in hex: distinct credentials share nothing. */
export function credentialTenant(digest: string): string {
  return `${PREFIX}${digest.slice(0, 32)}`;
}
