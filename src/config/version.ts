import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

/** What this baton was made from. */
export interface Origin {
  readonly version: string;
  /** Its commit, with `-dirty` where files were changed on top of it; `unknown` outside a clone. */
  readonly commit: string;
}

interface Found {
  readonly directory: URL;
  readonly version: string;
  /** Absent in a checkout. */
  readonly commit?: string;
}

/** Reads the version of this package, from a checkout or from its built form. */
export function readVersion(): string {
  return find()?.version ?? 'unknown';
}

/** Version and commit; in a checkout this asks git. */
export function readOrigin(): Origin {
  const found = find();
  if (found === undefined) return { version: 'unknown', commit: 'unknown' };
  return { version: found.version, commit: found.commit ?? askGit(fileURLToPath(found.directory)) };
}

function askGit(folder: string): string {
  const args = ['-C', folder, 'describe', '--always', '--exclude=*', '--abbrev=12', '--dirty'];
  try {
    return execFileSync('git', args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim();
  } catch {
    return 'unknown';
  }
}

/** A build writes dist/origin.json. dist/src is one level deeper than src, so both files are looked for upwards. */
function find(): Found | undefined {
  for (let directory = new URL('.', import.meta.url); ; directory = new URL('..', directory)) {
    for (const name of ['origin.json', 'package.json']) {
      const data = read(new URL(name, directory));
      if (data === undefined || !('version' in data)) continue;
      const commit = 'commit' in data ? { commit: String(data.commit) } : {};
      return { directory, version: String(data.version), ...commit };
    }
    if (directory.pathname === '/') return undefined;
  }
}

function read(file: URL): object | undefined {
  try {
    const data: unknown = JSON.parse(readFileSync(file, 'utf8'));
    return typeof data === 'object' && data !== null ? data : undefined;
  } catch (error) {
    if (error instanceof Error && 'code' in error && error.code === 'ENOENT') return undefined;
    throw error;
  }
}
