import { readFileSync } from 'node:fs';

/** Reads the version of this package, from a checkout or from its built form. */
export function readVersion(): string {
  // dist/src is one level deeper than src, so the file is looked for upwards.
  for (let directory = new URL('.', import.meta.url); ; directory = new URL('..', directory)) {
    try {
      const data: unknown = JSON.parse(readFileSync(new URL('package.json', directory), 'utf8'));
      if (typeof data === 'object' && data !== null && 'version' in data) return String(data.version);
    } catch (error) {
      if (!(error instanceof Error) || !('code' in error) || error.code !== 'ENOENT') throw error;
    }
    if (directory.pathname === '/') return 'unknown';
  }
}
