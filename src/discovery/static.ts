import type { MakeSource } from './source.ts';

/** The instances of the settings; they never change. */
export const staticSource: MakeSource = ({ instances }) => ({
  name: 'static',
  run: async (sink) => sink.view(instances),
});
