import { planLaunch } from '../../src/launch/plan.ts';
import { resolveSettings, type SettingsInput } from '../../src/launch/settings.ts';
import type { LaunchSettings } from '../../src/launch/topology.ts';

/** Resolves flags, and a topology file called `t.yaml` where there is one, in a build with both connectors. */
export function resolveLaunch(flags: SettingsInput['flags'], text?: string) {
  return resolveSettings({
    flags,
    ...(text === undefined ? {} : { file: { name: 't.yaml', text } }),
    connectors: ['nixl', 'lmcache'],
    simConnectors: ['nixl', 'lmcache', 'none'],
  });
}

/** The settings of flags that are right. */
export function settingsOf(flags: SettingsInput['flags'] = {}, text?: string): LaunchSettings {
  const result = resolveLaunch(flags, text);
  if (result.kind === 'error') throw new Error(JSON.stringify(result.problems));
  return result.settings;
}

/** Plans on a machine with `gpus` GPUs, where baton is run as `baton`. */
export function planOf(settings: LaunchSettings, env: Record<string, string> = {}, gpus = 8) {
  return planLaunch(settings, { self: ['baton'], env, gpus: Array.from({ length: gpus }, (_, i) => String(i)) });
}
