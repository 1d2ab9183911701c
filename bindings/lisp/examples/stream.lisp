;;;; A stream from one thread to another, and between processes by a name:
;;;;
;;;;     sbcl --script examples/stream.lisp                  both endpoints in this process
;;;;     sbcl --script examples/stream.lisp receive NAME     one process
;;;;     sbcl --script examples/stream.lisp send NAME        and another

(require :asdf)
(asdf:load-asd (truename (merge-pathnames "../pelton.asd" *load-truename*)))
(asdf:load-system "pelton")

(defun send-all (sender)
  (dotimes (i 1000000)
    ;; Written in place: a number and its square.
    (pelton:with-reserved ((sap size) sender 16)
      (setf (sb-sys:sap-ref-64 sap 0) i
            (sb-sys:sap-ref-64 sap 8) (* i i)))))

(defun receive-all (receiver)
  (let ((messages 0) (sum 0))
    ;; Read in place, and released; ends when the sender has closed.
    (pelton:do-received ((sap size) receiver)
      (incf messages)
      (incf sum (- (sb-sys:sap-ref-64 sap 8) (sb-sys:sap-ref-64 sap 0))))
    (format t "~:d messages, ~:d~%" messages sum)))

(destructuring-bind (&optional role name)
    (member-if (lambda (word) (member word '("send" "receive") :test #'string=)) sb-ext:*posix-argv*)
  (cond ((equal role "receive")
         (pelton:with-receiver (receiver name :accept t) (receive-all receiver)))
        ((equal role "send")
         (pelton:with-sender (sender name :timeout 60) (send-all sender)))
        (t
         (pelton:with-channel (sender receiver)
           (let ((thread (sb-thread:make-thread (lambda ()
                                                  (send-all sender)
                                                  (pelton:close-handle sender)))))
             (receive-all receiver)
             (sb-thread:join-thread thread))))))
