/** Tenant of requests without a credential, where none is needed. */
export const ANONYMOUS = 'anonymous';

const PREFIX = 'cred-';
const CLAIM_PREFIX = 'jwt-';

/** What one tenant may use; 0 is no limit. */
export interface TenantLimit {
  readonly requestsPerMinute: number;
  /** Of prompts and replies together. */
  readonly tokensPerMinute: number;
  /** Requests at a time. */
  readonly concurrency: number;
}

/** Tenant of each key by the key's SHA-256 in lower-case hex; the keys themselves are nowhere. */
export type ApiKeys = ReadonlyMap<string, string>;

/** A mistake in a file of keys; messages never repeat what a line holds. */
interface KeyProblem {
  readonly where: string;
  readonly message: string;
}

interface BadKeys {
  readonly kind: 'error';
  readonly problems: readonly KeyProblem[];
}

/** A file of keys, or each mistake in it. */
export type ApiKeysResult = { readonly kind: 'ok'; readonly keys: ApiKeys } | BadKeys;

/** What a token of the RPC port allows beyond the calls of its own tenant. */
export interface TokenRights {
  readonly tenant: string;
  /** The word `any-tenant`: names tenants itself, as a router and a facade do. */
  readonly anyTenant: boolean;
  /** The word `operator`: drains instances, takes entries for release, invalidates owners. */
  readonly operator: boolean;
  /** The word `unverified`: takes without a proof. */
  readonly unverified: boolean;
}

/** What each token allows, by its SHA-256 in lower-case hex; the tokens themselves are nowhere. */
export type RpcTokens = ReadonlyMap<string, TokenRights>;

/** A file of tokens, or each mistake in it. */
export type RpcTokensResult = { readonly kind: 'ok'; readonly keys: RpcTokens } | BadKeys;

const LINE = /^(\S+)[ \t]+sha256:([0-9a-f]{64})((?:[ \t]+\S+)*)$/i;
const TENANT = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;
const RIGHTS = ['any-tenant', 'operator', 'unverified'] as const;

/** Whether a tenant can have this name: not one of those that baton makes up for clients without a key. */
export function isTenantName(name: string): boolean {
  return TENANT.test(name) && !isReserved(name);
}

function isReserved(name: string): boolean {
  return name === ANONYMOUS || name.startsWith(PREFIX) || name.startsWith(CLAIM_PREFIX);
}

/** Reads `<tenant> sha256:<64 hex>` lines; blank lines and what follows a `#` do not count. */
export function parseApiKeys(text: string, fileName: string): ApiKeysResult {
  return parseKeys(text, fileName, [], (tenant) => tenant);
}

/** Reads `<tenant> sha256:<64 hex> [any-tenant] [operator] [unverified]` lines, as {@link parseApiKeys} does. */
export function parseRpcTokens(text: string, fileName: string): RpcTokensResult {
  return parseKeys(text, fileName, RIGHTS, (tenant, words) => ({
    tenant,
    anyTenant: words.includes('any-tenant'),
    operator: words.includes('operator'),
    unverified: words.includes('unverified'),
  }));
}

function parseKeys<T>(
  text: string,
  fileName: string,
  rights: readonly string[],
  make: (tenant: string, words: readonly string[]) => T,
): { readonly kind: 'ok'; readonly keys: ReadonlyMap<string, T> } | BadKeys {
  const keys = new Map<string, T>();
  const lineOf = new Map<string, number>();
  const problems: KeyProblem[] = [];
  for (const [index, raw] of text
    .replace(/^\uFEFF/, '')
    .split('\n')
    .entries()) {
    const line = raw.replace(/(^|\s)#.*$/s, '').trim();
    if (line === '') continue;
    const where = `${fileName}:${index + 1}`;
    const [, tenant = '', digest = '', rest = ''] = LINE.exec(line) ?? [];
    const words = rest.split(/[ \t]+/).filter((word) => word !== '');
    const message = mistakeIn({ tenant, digest, words }, rights, lineOf);
    if (message !== undefined) {
      problems.push({ where, message });
      continue;
    }
    keys.set(digest.toLowerCase(), make(tenant, words));
    lineOf.set(digest.toLowerCase(), index + 1);
  }
  if (problems.length > 0) return { kind: 'error', problems };
  // Almost surely a slip: every request would be refused.
  if (keys.size === 0) return { kind: 'error', problems: [{ where: fileName, message: 'has no key' }] };
  return { kind: 'ok', keys };
}

interface KeyLine {
  readonly tenant: string;
  readonly digest: string;
  readonly words: readonly string[];
}

function mistakeIn(
  { tenant, digest, words }: KeyLine,
  rights: readonly string[],
  lineOf: ReadonlyMap<string, number>,
): string | undefined {
  if (digest === '' || (rights.length === 0 && words.length > 0)) {
    return 'expected a tenant and a hash, "team-a sha256:<64 hex digits>"; baton hash-key makes the hash of a key';
  }
  // The word is not repeated: it may be a part of a key.
  if (words.some((word) => !rights.includes(word))) return `expected only ${rights.join(', ')} after the hash`;
  if (!TENANT.test(tenant)) {
    return 'expected a tenant of at most 64 letters, digits and ._-, beginning with a letter or digit';
  }
  // These are what clients without keys get; a named tenant must not be one that others can take.
  if (isReserved(tenant)) {
    return `a tenant cannot be called "${ANONYMOUS}" or begin with "${PREFIX}" or "${CLAIM_PREFIX}"; choose another name`;
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

/** Tenant that a token's claim names: that name, or a hash of what can be none, such as `auth0|5f7c` or a mail address. */
export function claimTenant(claim: string, sha256Hex: (text: string) => string): string {
  return isTenantName(claim) ? claim : `${CLAIM_PREFIX}${sha256Hex(claim).slice(0, 32)}`;
}

/** Tenant of an unchecked credential by its SHA-256 in hex: distinct credentials share nothing. */
export function credentialTenant(digest: string): string {
  return `${PREFIX}${digest.slice(0, 32)}`;
}
