/** The part of the configuration that decides which key engines get. */
export interface EngineKeyRules {
  readonly engineAuth: 'auto' | 'replace' | 'forward' | 'strip';
  readonly openaiApiKey?: string;
}

/**
 * Key that probes of an instance send: none under `strip`; the instance's own; else OPENAI_API_KEY, except under
 * `forward`, where legs carry the client's key and baton's never goes to engines.
 */
export function probeKeyOf(instance: { readonly apiKey?: string }, rules: EngineKeyRules): string | undefined {
  if (rules.engineAuth === 'strip') return undefined;
  return instance.apiKey ?? (rules.engineAuth === 'forward' ? undefined : rules.openaiApiKey);
}
