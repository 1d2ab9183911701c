;;; Prints every exported name of the loaded system as Markdown, with its arguments and its docstring.
(defun kinds (symbol)
  (append (when (macro-function symbol) '(macro))
          (when (and (fboundp symbol) (not (macro-function symbol))) '(function))
          (when (and (find-class symbol nil) (subtypep symbol 'condition)) '(condition))
          (when (and (find-class symbol nil) (not (subtypep symbol 'condition))) '(class))
          (when (boundp symbol) '(variable))))

(defun documentation-of (symbol kind)
  (documentation symbol (ecase kind ((macro function) 'function) ((condition class) 'type) (variable 'variable))))

(let ((*print-case* :downcase) (*package* (find-package '#:pelton)))
  (format t "# The Common Lisp system~2%[bindings/lisp](../bindings/lisp/README.md) has how to install and to begin.~2%")
  (dolist (symbol (sort (loop for symbol being the external-symbols of '#:pelton collect symbol) #'string<))
    (dolist (kind (kinds symbol))
      (format t "## ~(~a~)~2%~@[```text~%~a~%```~2%~]~a~2%" symbol
              (when (member kind '(macro function))
                (format nil "(~(~a~)~{ ~(~s~)~})" symbol (sb-introspect:function-lambda-list symbol)))
              (format nil "~:(~a~). ~@[~a~]" kind (documentation-of symbol kind))))))
