import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, expect, type TestContext, test } from 'vitest';
import { stringify } from 'yaml';
import { ALERTS_FILE, dashboardQueries, readAlerts } from '../support/monitoring.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-rules-'));
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

/** Prometheus' own checker; skips the test aloud where there is none. */
async function promtool(context: TestContext, ...args: readonly string[]): Promise<string> {
  if (!(await hasTool('promtool', ['--version']))) skipWithout(context, 'promtool');
  const { stdout } = await run('promtool', [...args]);
  return stdout;
}

function write(name: string, content: unknown): string {
  const file = join(scratch, name);
  writeFileSync(file, stringify(content));
  return file;
}

test('Prometheus takes the alerts', async (context) => {
  expect(await promtool(context, 'check', 'rules', ALERTS_FILE)).toContain(`${readAlerts().length} rules found`);
});

test('Prometheus takes every query of the dashboard', async (context) => {
  const rules = dashboardQueries().map((expr, index) => ({ record: `query_${index}`, expr }));
  const file = write('dashboard.yaml', { groups: [{ name: 'dashboard', rules }] });
  expect(await promtool(context, 'check', 'rules', file)).toContain(`${rules.length} rules found`);
});

test('alerts fire when they should, and not before', async (context) => {
  const labels = { job: 'baton', instance: 'a:29000' };
  const one = (text: Readonly<Record<string, string>>) =>
    Object.entries(text)
      .map(([key, value]) => `${key}="${value}"`)
      .join(',');
  const at = (name: string, values: string, more: Readonly<Record<string, string>> = {}) => ({
    series: `${name}{${one({ ...labels, ...more })}}`,
    values,
  });
  const up = at('baton_build_info', '1x120', { version: '0' });
  const fires = (alertname: string, evalTime: string, found: readonly Readonly<Record<string, string>>[]) => {
    const severity = readAlerts().find(({ alert }) => alert === alertname)?.labels.severity;
    return {
      eval_time: evalTime,
      alertname,
      exp_alerts: found.map((exp_labels) => ({
        exp_labels: { ...exp_labels, severity },
        exp_annotations: EXPECTED[alertname],
      })),
    };
  };
  const requests = (status_class: string, values: string) =>
    at('baton_requests_total', values, { api: 'completions', model: 'm', mode: 'none', status_class });
  const tests = [
    {
      interval: '1m',
      input_series: [up, requests('2xx', '0+90x60'), requests('5xx', '0+10x60')],
      alert_rule_test: [
        fires('BatonServerErrors', '4m', []),
        fires('BatonServerErrors', '12m', [{ job: 'baton' }]),
        fires('BatonAbsent', '12m', []),
      ],
    },
    {
      interval: '1m',
      input_series: [up, at('nodejs_eventloop_lag_p99_seconds', '0.5x60'), at('baton_registry_stale', '0x10 1x50')],
      alert_rule_test: [
        fires('BatonEventLoopLag', '3m', []),
        fires('BatonEventLoopLag', '10m', [labels]),
        fires('BatonRegistryStale', '10m', []),
        fires('BatonRegistryStale', '20m', [{ job: 'baton' }]),
      ],
    },
    {
      // 14 days and ten minutes before its end.
      interval: '1m',
      input_series: [up, at('baton_tls_certificate_expiry_timestamp_seconds', '1210200x60', { use: 'facade' })],
      alert_rule_test: [
        fires('BatonCertificateEnds', '9m', []),
        fires('BatonCertificateEnds', '30m', [{ ...labels, use: 'facade' }]),
      ],
    },
    { interval: '1m', input_series: [], alert_rule_test: [fires('BatonAbsent', '10m', [{}])] },
    {
      // Another program's event loop is none of baton's.
      interval: '1m',
      input_series: [{ series: 'nodejs_eventloop_lag_p99_seconds{job="shop",instance="b:1"}', values: '9x60' }],
      alert_rule_test: [fires('BatonEventLoopLag', '30m', [])],
    },
  ];
  const file = write('tests.yaml', { rule_files: [ALERTS_FILE], evaluation_interval: '1m', tests });
  expect(await promtool(context, 'test', 'rules', file)).toContain('SUCCESS');
});

const runbook = (alert: string) => `docs/troubleshooting.md#${alert.toLowerCase()}`;
/** What the templates of the annotations come to. */
const EXPECTED: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  BatonServerErrors: { summary: '10% of the requests get a 5xx.', runbook: runbook('BatonServerErrors') },
  BatonEventLoopLag: {
    summary: 'Timers of a:29000 are 500ms late: its CPU is not enough.',
    runbook: runbook('BatonEventLoopLag'),
  },
  BatonCertificateEnds: {
    summary: 'The certificate of facade at a:29000 ends in 13d 23h 40m 0s.',
    runbook: runbook('BatonCertificateEnds'),
  },
  BatonRegistryStale: {
    summary: 'The registry does not answer; the view of the engines is an old one.',
    runbook: runbook('BatonRegistryStale'),
  },
  BatonAbsent: { summary: 'No process of baton is scraped.', runbook: runbook('BatonAbsent') },
};
