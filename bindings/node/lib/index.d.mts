export * from './index.js';
import * as pelton from './index.js';
export default pelton;
