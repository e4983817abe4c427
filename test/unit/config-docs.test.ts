import { readFileSync, writeFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import { Document, parse } from 'yaml';
import { describeKeys } from '../../src/config/describe-keys.ts';
import { envName } from '../../src/config/flag-layers.ts';
import { FLAGS } from '../../src/config/flags.ts';
import { loadConfig } from '../../src/config/load-config.ts';

const FILE = new URL('../../docs/configuration.md', import.meta.url);

function keyTable(): string {
  const rows = describeKeys()
    .map((key) => ({ ...key, path: key.path.replace(/^pools\.\w+\./, 'pools.*.') }))
    .filter((key, i, all) => all.findIndex((other) => other.path === key.path) === i)
    .map(
      ({ path, fallback, about, live }) =>
        `| \`${path}\` | ${/[` ]|^none$|^required$/.test(fallback) ? fallback : `\`${fallback}\``} | ${live ? 'yes' : '–'} | ${about} |`,
    );
  return ['| key | default | live | meaning |', '|---|---|---|---|', ...rows].join('\n');
}

function flagTable(): string {
  const rows = FLAGS.map(({ name, alias, paths }) => {
    const both = alias === undefined ? `\`--${name}\`` : `\`--${name}\`, \`--${alias}\``;
    const keys = (paths ?? []).map((path) => `\`${path.join('.')}\``).join(', ');
    return `| ${both} | \`${envName(name)}\` | ${keys === '' ? '–' : keys} |`;
  });
  return ['| flag | variable | key |', '|---|---|---|', ...rows].join('\n');
}

function block(text: string, name: string): RegExpExecArray {
  const found = new RegExp(`(<!-- ${name}:[^\\n]*-->\\n)([\\s\\S]*?)(<!-- end -->)`).exec(text);
  if (found === null) throw new Error(`docs/configuration.md has no block "${name}"`);
  return found;
}

describe('docs/configuration.md', () => {
  const tables = { keys: keyTable(), flags: flagTable() };
  if (process.env['UPDATE_DOCS'] !== undefined) {
    let text = readFileSync(FILE, 'utf8');
    for (const [name, table] of Object.entries(tables)) {
      const [whole, start, , end] = block(text, name);
      text = text.replace(whole, () => `${start}\n${table}\n\n${end}`);
    }
    writeFileSync(FILE, text);
  }
  const text = readFileSync(FILE, 'utf8');

  test.each(Object.entries(tables))('the table of %s is the one of the code', (name, table) => {
    expect(block(text, name)[2]?.trim()).toBe(table);
  });

  test('every key is described', () => {
    for (const { path, about, fallback } of describeKeys()) {
      expect(about, path).toMatch(/^\S.*\.$/);
      expect(fallback, path).not.toMatch(/^$|undefined/);
    }
  });

  test('every flag sets a key that exists', () => {
    const known = describeKeys().map(({ path }) => path);
    for (const { paths } of FLAGS) for (const path of paths ?? []) expect(known).toContain(path.join('.'));
  });

  test('its example is a good file', () => {
    const example = /```yaml\n([\s\S]*?)```/.exec(text)?.[1] ?? '';
    const known = { policies: ['round_robin'], connectors: ['nixl'], stores: ['memory', 'valkey'] };
    const loaded = loadConfig({ flags: {}, env: {}, fileText: example, known, terminal: false });
    expect(loaded).toMatchObject({ kind: 'ok', warnings: [] });
    expect(loaded.kind === 'ok' && loaded.config.instances.map(({ role }) => role)).toEqual([
      'prefill',
      'prefill',
      'decode',
      'decode',
    ]);
  });

  test('the defaults that it shows are what an empty file means', () => {
    const known = { policies: ['round_robin'], connectors: ['nixl'], stores: ['memory', 'valkey'] };
    const lines = describeKeys().filter(
      ({ path, fallback }) => !/\[\]|^pools\./.test(path) && !/[` ]|^none$/.test(fallback),
    );
    const document = new Document({});
    for (const { path, fallback } of lines) document.setIn(path.split('.'), parse(fallback));
    const written = document.toString();
    const load = (fileText: string) => loadConfig({ flags: {}, env: {}, fileText, known, terminal: false });
    expect(load(written)).toMatchObject({ kind: 'ok' });
    const read = (fileText: string) => ({ ...load(fileText), input: {}, source: {} });
    expect(read(written)).toEqual(read(''));
  });
});
