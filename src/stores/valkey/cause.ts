import type { ValkeyOptions } from '../store.ts';

/**
 * Why the server cannot be used, for its operator: a word such as ECONNREFUSED, or a sentence of one's own; the error's could
 * tell more than it should. Undefined for what says nothing.
 */
export function causeOf(error: unknown, settings: ValkeyOptions): string | undefined {
  if (!(error instanceof Error)) return undefined;
  if (error.name === 'ParserError') return 'what answers there is no Redis or Valkey server';
  const code = 'code' in error && typeof error.code === 'string' ? error.code : error.message.split(' ')[0];
  if (code === 'ETIMEDOUT' || error.message === 'Command timed out') return noAnswer(settings);
  if (code === 'ERR_SSL_WRONG_VERSION_NUMBER') return `${code}: what answers there speaks no TLS`;
  // A password that is refused shows by itself, or by the commands behind it.
  if (code === 'WRONGPASS' || code === 'NOAUTH') return `${code}: ${whatOfPassword(settings)}`;
  return code !== undefined && /^[A-Z_]{4,40}$/.test(code) ? code : undefined;
}

/** The cause where nothing answers. */
export function noAnswer(settings: ValkeyOptions): string {
  return isTls(settings) ? 'ETIMEDOUT: no answer in TLS; a port without TLS wants redis:// or valkey://' : 'ETIMEDOUT';
}

export function isTls({ url }: ValkeyOptions): boolean {
  return /^(rediss|valkeys):/.test(url);
}

function whatOfPassword({ url, passwordFile }: ValkeyOptions): string {
  const again = 'then start this process again';
  if (passwordFile !== undefined) {
    return `the server refuses the password; write the right one into the file that store.valkey.password_file names, and the user it is for into store.valkey.url, ${again}`;
  }
  if (new URL(url).password !== '') {
    return `the server refuses the user or the password; correct them in store.valkey.url (--valkey-url), ${again}`;
  }
  return `the server wants a password; write it into a file and name that with store.valkey.password_file, ${again}`;
}
