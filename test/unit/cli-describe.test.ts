import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, describe, expect, test } from 'vitest';
import { runCli } from '../../src/cli/run.ts';
import { FLAGS } from '../../src/config/flags.ts';
import { cliHost } from '../support/cli-host.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const folder = mkdtempSync(join(tmpdir(), 'baton-describe-'));
afterAll(() => rmSync(folder, { recursive: true }));

async function printed(...argv: readonly string[]): Promise<string> {
  const { host, seen } = cliHost(argv);
  expect(await runCli(host)).toBe(0);
  expect(seen.err).toBe('');
  return seen.out;
}

/** The script of a shell in a file, and an empty one beside it that `check-config` may be given. */
async function scriptOf(shell: string): Promise<string> {
  const file = join(folder, `baton.${shell}`);
  writeFileSync(file, await printed('completion', shell));
  writeFileSync(join(folder, 'one.yaml'), '');
  return file;
}

/** Words of a command line, the last to be completed, and what is offered for it. */
const OFFERED: readonly (readonly [readonly string[], readonly string[]])[] = [
  [['ser'], ['serve']],
  [
    ['pool', ''],
    ['list', 'add', 'drain', 'resume', 'remove', 'watch'],
  ],
  [['help', 'la'], ['launch']],
  [['serve', '--rpc-p'], ['--rpc-port']],
  [['kvstore', '--admin-p'], ['--admin-port']],
  [
    ['pool', 'list', '--role', ''],
    ['prefill', 'decode', 'both'],
  ],
  [
    ['completion', ''],
    ['bash', 'zsh', 'fish'],
  ],
  // A host: nobody can know it.
  [['serve', '--host', ''], []],
  [['check-config', 'one.'], ['one.yaml']],
];

describe('completions', () => {
  test('bash', async () => {
    const script = await scriptOf('bash');
    const ask = (words: readonly string[]) =>
      `COMP_WORDS=(baton ${words.map((word) => `'${word}'`).join(' ')}); COMP_CWORD=${words.length}; asked_files=; _baton
       [ -z "$asked_files" ] || COMPREPLY=($(compgen -f -- "\${COMP_WORDS[COMP_CWORD]}")); echo "\${COMPREPLY[*]}"`;
    // Files are left to the shell's own completion.
    const lines = ['compopt() { asked_files=1; }', `source ${script}`, ...OFFERED.map(([words]) => ask(words))];
    const { stdout } = await run('bash', ['--norc', '-c', lines.join('\n')], { cwd: folder });
    expect(stdout.split('\n').slice(0, -1)).toEqual(OFFERED.map(([, offered]) => offered.join(' ')));
  });

  test('fish', async (context) => {
    if (!(await hasTool('fish', ['--version']))) skipWithout(context, 'fish');
    const script = await scriptOf('fish');
    const asked = OFFERED.map(([words]) => `complete -C 'baton ${words.join(' ')}'; echo ---`);
    const { stdout } = await run('fish', ['-N', '-c', [`source ${script}`, ...asked].join('\n')], { cwd: folder });
    const offered = stdout
      .split('---\n')
      .slice(0, -1)
      .map((text) => text.split('\n').map((line) => line.split('\t')[0] ?? ''));
    expect(offered.map((words) => words.filter((word) => word !== '').toSorted())).toEqual(
      OFFERED.map(([, words]) => words.toSorted()),
    );
  });

  test('zsh', async (context) => {
    if (!(await hasTool('zsh', ['--version']))) skipWithout(context, 'zsh');
    const script = await scriptOf('zsh');
    // zsh completes in its line editor alone: here the functions that it would call say what they were given.
    const stubs = [
      'matching() { for it in "$@"; do it=${it%%:*}; [[ $it == $PREFIX* ]] && print -rn -- "$it "; done }',
      '_describe() { matching "${(@P)@[-1]}" }',
      'compadd() { shift; matching "$@" }',
      '_files() { matching * }',
      'compdef() { }',
    ];
    const asked = OFFERED.map(([words]) => {
      const all = ['baton', ...words].map((word) => `'${word}'`);
      return `words=(${all.join(' ')}); CURRENT=${all.length}; PREFIX=${all.at(-1)}; _baton; print`;
    });
    const lines = [...stubs, `source ${script}`, ...asked];
    const { stdout } = await run('zsh', ['-fc', lines.join('\n')], { cwd: folder });
    expect(
      stdout
        .split('\n')
        .slice(0, -1)
        .map((line) => line.trim()),
    ).toEqual(OFFERED.map(([, offered]) => offered.join(' ')));
  });

  test('another shell is refused with the names of the known ones', async () => {
    const { host, seen } = cliHost(['completion', 'tcsh']);
    expect(await runCli(host)).toBe(2);
    expect(seen.err).toMatch(/bash, zsh, fish/);
  });
});

describe('man page', () => {
  test('has every command and every flag of serve, with what help says of them', async () => {
    const page = (await printed('man')).replaceAll('\\-', '-');
    expect(page).toContain('.TH BATON 1 "" "baton 1.2.3"');
    const help = await printed('--help');
    const commands = [...help.matchAll(/^ {2}([a-z-]+) [^\n]* {2}/gm)].map(([, name]) => name);
    expect(commands.length).toBeGreaterThan(10);
    for (const name of commands) if (name !== 'help') expect(page).toContain(`.SS "baton ${name} `);
    for (const { name, about } of FLAGS) {
      expect(page).toMatch(new RegExp(`^\\.B .*--${name}\\b`, 'm'));
      expect(page).toContain(about.replaceAll('\\', '\\e').replaceAll('"', '\\(dq'));
    }
    expect(page).toContain('baton serve --sim');
  });

  test('is good roff', async (context) => {
    if (!(await hasTool('sh', ['-c', 'command -v mandoc']))) skipWithout(context, 'mandoc');
    const file = join(folder, 'baton.1');
    writeFileSync(file, await printed('man'));
    // A page has no date: it is that of its version.
    const { stdout } = await run('mandoc', ['-T', 'lint', '-W', 'warning', file]).catch(
      (error: { stdout: string }) => error,
    );
    expect(stdout.split('\n').filter((line) => line !== '' && !line.includes('missing date'))).toEqual([]);
    const { stdout: shown } = await run('mandoc', ['-T', 'ascii', file]);
    expect(shown.replaceAll(/.[\b]/g, '')).toMatch(/BATON\(1\)\s+User Commands\s+BATON\(1\)/);
  });
});

test('licenses: a baton that is no executable says where they are', async () => {
  const { host, seen } = cliHost(['licenses']);
  expect(await runCli(host)).toBe(1);
  expect(seen).toEqual({
    out: '',
    err: 'baton: this is no executable of one file: its packages lie in node_modules, each with its licence\n',
  });
  const inside = cliHost(['licenses'], { licenses: () => 'all of them\n' });
  expect(await runCli(inside.host)).toBe(0);
  expect(inside.seen.out).toBe('all of them\n');
});
